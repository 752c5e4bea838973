"""Secrets from files: the fleet's token and API keys.

A file may come from anywhere, such as a Kubernetes secret, and is read again when it changes.
Error messages never contain a secret.
"""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from baton.config.clients import ApiKeyConfig
from baton.config.watched_files import WatchedFiles
from baton.config.yaml_text import YamlTextError, parse_yaml
from baton.folders import read_small

FEWEST_TOKEN_CHARACTERS = 16
FEWEST_KEY_CHARACTERS = 8
_KEYS = TypeAdapter(dict[str, ApiKeyConfig])


class SecretError(ValueError):
    """A secret cannot be used; the message names its source and the fix."""


def read_text(file: str | Path, what: str) -> str:
    """Return the contents of a file that holds a secret; ``what`` describes it in errors.

    Raises:
        SecretError: The file cannot be read, or is not UTF-8 text.
    """
    try:
        return read_small(file).decode()
    except OSError as error:
        raise SecretError(
            f"{what} cannot be read from {file}: {error.strerror}; the file must exist and be "
            "readable by the user that runs this process"
        ) from error
    except UnicodeDecodeError as error:
        raise SecretError(f"{what}: {file} is not UTF-8 text") from error


def tokens_in(text: str, source: str) -> tuple[str, ...]:
    """Return the fleet's tokens, one per line: the first is sent, all are accepted."""
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    shortest = min(map(len, tokens), default=0)
    if shortest < FEWEST_TOKEN_CHARACTERS:
        raise SecretError(
            f"the fleet's token in {source} has {shortest} characters, at least "
            f"{FEWEST_TOKEN_CHARACTERS} are needed: `openssl rand -hex 32` makes one"
        )
    return tokens


def read_tokens(file: str | Path) -> tuple[str, ...]:
    """Return the fleet's tokens in a file, as ``tokens_in`` does."""
    return tokens_in(read_text(file, "the fleet's token"), str(file))


class ApiKeysFile(Mapping[str, ApiKeyConfig]):
    """API keys in a separate file, in the form of ``api_keys`` in the fleet file.

    Added keys are accepted at once, and removed keys are refused at once. To rotate a key, keep
    the old and the new one in the file for a while.

    Raises:
        SecretError: The file cannot be used.
    """

    def __init__(self, file: str) -> None:
        self._keys = WatchedFiles((file,), lambda: read_api_keys(file))

    def __getitem__(self, key: str) -> ApiKeyConfig:
        return self._keys.current[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.current)

    def __len__(self) -> int:
        return len(self._keys.current)

    # Both read the file once for all keys: it may change between two reads.
    def items(self) -> ItemsView[str, ApiKeyConfig]:
        """Return the keys and their permissions."""
        return self._keys.current.items()

    def values(self) -> ValuesView[ApiKeyConfig]:
        """Return the permissions of all keys."""
        return self._keys.current.values()

    @property
    def is_stale(self) -> bool:
        """State in which the file is wrong, and its last good keys are in use."""
        return self._keys.is_stale

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys)"


def read_api_keys(file: str) -> dict[str, ApiKeyConfig]:
    """Return the API keys in a file.

    Raises:
        SecretError: The file cannot be read, or is not ``key: tenant`` lines. The message contains
            no key.
    """
    text = read_text(file, "clients.api_keys_file")
    try:
        data, _ = parse_yaml(text, "a file of API keys", lambda path: ("a key", *path[1:]))
        keys = _KEYS.validate_python(data)
    except YamlTextError as error:
        raise SecretError(f"{file}:{error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        inner = ".".join(map(str, problem["loc"][1:]))
        raise SecretError(f"{file}: a key's entry: {inner or 'it'}: {problem['msg']}") from None
    if any(len(key) < FEWEST_KEY_CHARACTERS for key in keys):
        raise SecretError(f"{file}: a key must have at least {FEWEST_KEY_CHARACTERS} characters")
    return keys
