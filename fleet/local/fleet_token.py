"""The fleet's token: what routers and workers show each other. Stable, so that routers agree.

    pools: {token_file: …}   in the fleet file: a file on every host
    BATON_FLEET_TOKEN        the token itself
    BATON_FLEET_TOKEN_FILE   a file that holds it, such as a Kubernetes secret
    otherwise                ~/.local/state/baton/FLEET/fleet.token, made by the first `baton up`

A file may hold two, one a line, while one follows the other: the first is shown, both are accepted,
and it is read again when it changes. A token is never put on a command line or into a log.
"""

import os
import secrets
from typing import NamedTuple

from baton.config.fleet_file import FleetConfig
from baton.config.secrets import SecretError, read_tokens, tokens_in
from fleet.local.state import state_folder, write_whole

TOKEN_VARIABLE = "BATON_FLEET_TOKEN"  # noqa: S105 - its name, not it
FILE_VARIABLE = "BATON_FLEET_TOKEN_FILE"
TokenError = SecretError


class KnownToken(NamedTuple):
    """The token that is shown now, and the file that it is from; "" for the environment."""

    token: str
    file: str

    @property
    def environment(self) -> dict[str, str]:
        """For a router on this host, over what this process has."""
        kept = {n: v for n, v in os.environ.items() if n not in (TOKEN_VARIABLE, FILE_VARIABLE)}
        if self.file:
            return {**kept, FILE_VARIABLE: self.file}
        return {**kept, TOKEN_VARIABLE: self.token}

    def for_workers(self, config: FleetConfig, *, here: bool) -> "KnownToken":
        """What workers are told: a file to read by themselves, or the token.

        Args:
            config: The fleet.
            here: Whether all of it is on this host; a file that only this one has is of no use
                to workers elsewhere, who are told the token.
        """
        if self.file and (here or config.pools.token_file):
            return KnownToken("", self.file)
        return KnownToken(self.token, "")


def given_token(config: FleetConfig | None = None) -> KnownToken | None:
    """The token of the fleet file, of the environment or of the file that it names, if one is.

    Raises:
        SecretError: It is too short, or its file cannot be read.
    """
    if config is not None and config.pools.token_file:
        return _of_file(config.pools.token_file)
    if (token := os.environ.get(TOKEN_VARIABLE)) is not None:
        return KnownToken(tokens_in(token, TOKEN_VARIABLE)[0], "")
    if (named := os.environ.get(FILE_VARIABLE)) is not None:
        return _of_file(os.path.abspath(named))  # noqa: PTH100 - a link is followed at each read
    return None


def fleet_token(name: str, config: FleetConfig | None = None) -> KnownToken:
    """The token of a fleet that is started here; the first start makes one and keeps it.

    Args:
        name: Of the fleet's state folder.
        config: The fleet, which may name a file.

    Raises:
        SecretError: The one that is there cannot be used.
    """
    if (given := given_token(config)) is not None:
        return given
    file = state_folder(name) / "fleet.token"
    if not file.exists() or not file.stat().st_size:  # a full disk leaves an empty one
        write_whole(file, secrets.token_urlsafe(32).encode())
    return _of_file(str(file))


def _of_file(file: str) -> KnownToken:
    return KnownToken(read_tokens(file)[0], file)
