"""Secrets by file or environment: the fleet's token and API keys.

A file may come from anywhere, such as a Kubernetes secret. It is read again when it changes.
Nothing here puts a secret into a message.
"""

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from baton.config.clients import ApiKeyConfig
from baton.config.watched_files import WatchedFiles
from baton.config.yaml_text import YamlTextError, parse_yaml

FEWEST_TOKEN_CHARACTERS = 16
FEWEST_KEY_CHARACTERS = 8
_KEYS = TypeAdapter(dict[str, ApiKeyConfig])


class SecretError(ValueError):
    """A secret cannot be had; the message names where it was looked for and what to do."""


def read_text(file: str | Path, what: str) -> str:
    """The contents of a file that holds a secret.

    Args:
        file: Which.
        what: For the message.

    Raises:
        SecretError: It cannot be read, or is no text.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise SecretError(
            f"{what} cannot be read from {file}: {error.strerror}; the file must be there, and "
            "readable by the user that runs this process"
        ) from error
    except UnicodeDecodeError as error:
        raise SecretError(f"{what}: {file} is not UTF-8 text") from error


def tokens_in(text: str, source: str) -> tuple[str, ...]:
    """The fleet's tokens, one a line; the first is shown to others, all are accepted.

    Raises:
        SecretError: There is none, or one is too short.
    """
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    shortest = min(map(len, tokens), default=0)
    if shortest < FEWEST_TOKEN_CHARACTERS:
        raise SecretError(
            f"the fleet's token in {source} has {shortest} characters, {FEWEST_TOKEN_CHARACTERS} "
            "are the least: `openssl rand -hex 32` makes one"
        )
    return tokens


def read_tokens(file: str | Path) -> tuple[str, ...]:
    """The fleet's tokens in a file; see ``tokens_in``."""
    return tokens_in(read_text(file, "the fleet's token"), str(file))


class ApiKeysFile(Mapping[str, ApiKeyConfig]):
    """API keys in a file of their own, of the form that ``api_keys`` has in the fleet file.

    A key that is added there works at once, and one that is taken out is refused at once; to change
    a key, let both stand for a while.

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

    # One look at the file for all of them: it may change between two.

    def items(self) -> ItemsView[str, ApiKeyConfig]:
        """The keys, and what they may do."""
        return self._keys.current.items()

    def values(self) -> ValuesView[ApiKeyConfig]:
        """What they may do."""
        return self._keys.current.values()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} keys)"


def read_api_keys(file: str) -> dict[str, ApiKeyConfig]:
    """The API keys in a file.

    Raises:
        SecretError: It cannot be read, or is not ``key: tenant`` lines. Keys stand in no message.
    """
    text = read_text(file, "clients.api_keys_file")
    try:
        data, _ = parse_yaml(text, "a file of API keys", lambda where: ("a key", *where[1:]))
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
