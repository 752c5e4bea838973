"""The fleet's token: what routers and workers show each other. Stable, so that routers agree.

    BATON_FLEET_TOKEN        the token itself
    BATON_FLEET_TOKEN_FILE   a file that holds it, such as a Kubernetes secret
    otherwise                ~/.local/state/baton/FLEET/fleet.token, made by the first `baton up`

It is never put on a command line or into a log.
"""

import os
import secrets
from pathlib import Path

from fleet.local.state import state_folder

TOKEN_VARIABLE = "BATON_FLEET_TOKEN"  # noqa: S105 - its name, not it
FILE_VARIABLE = "BATON_FLEET_TOKEN_FILE"
_FEWEST_CHARACTERS = 16


class TokenError(ValueError):
    """There is no usable token; the message says where it was looked for."""


def given_token() -> str | None:
    """The token from the environment or from the file that it names; None if it names none.

    Raises:
        TokenError: It is too short, or its file cannot be read.
    """
    if (token := os.environ.get(TOKEN_VARIABLE)) is not None:
        return _checked(token, TOKEN_VARIABLE)
    if (named := os.environ.get(FILE_VARIABLE)) is not None:
        return _read(Path(named))
    return None


def fleet_token(name: str) -> str:
    """The token of a fleet that is started here; the first start makes one and keeps it.

    Args:
        name: Of the fleet's state folder.

    Raises:
        TokenError: The one that is there cannot be used.
    """
    if (token := given_token()) is not None:
        return token
    file = state_folder(name) / "fleet.token"
    if file.exists():
        return _read(file)
    token = secrets.token_urlsafe(32)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(token)
    return token


def _read(file: Path) -> str:
    try:
        return _checked(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(f"the fleet's token cannot be read from {file}: {error}") from error


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if len(token) < _FEWEST_CHARACTERS:
        raise TokenError(
            f"the fleet's token in {source} has {len(token)} characters, {_FEWEST_CHARACTERS} are "
            "the least: `openssl rand -hex 32` makes one"
        )
    return token
