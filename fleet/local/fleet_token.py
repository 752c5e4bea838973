"""The fleet token, with which routers and workers authenticate to each other.

    pools: {token_file: …}   in the fleet file: a file on every host
    BATON_FLEET_TOKEN        the token itself
    BATON_FLEET_TOKEN_FILE   a file with the token, such as a Kubernetes secret
    otherwise                ~/.local/state/baton/FLEET/fleet.token, made by the first `baton up`

During a rotation a file may have two tokens, one per line: the first is sent, both are accepted.
The file is reread when it changes. A token never appears on a command line or in a log.
"""

import os
import secrets
from typing import NamedTuple

from baton.config.fleet_file import FleetConfig
from baton.config.secrets import read_tokens, tokens_in
from baton.folders import replace_file
from fleet.local.state import state_folder

TOKEN_VARIABLE = "BATON_FLEET_TOKEN"  # noqa: S105 - a name, not a token
FILE_VARIABLE = "BATON_FLEET_TOKEN_FILE"


class KnownToken(NamedTuple):
    """Current fleet token and its file; the file is "" for a token from the environment."""

    token: str
    file: str

    @property
    def environment(self) -> dict[str, str]:
        """Return this process's environment with the token, for a router on this host."""
        kept = {n: v for n, v in os.environ.items() if n not in (TOKEN_VARIABLE, FILE_VARIABLE)}
        if self.file:
            return {**kept, FILE_VARIABLE: self.file}
        return {**kept, TOKEN_VARIABLE: self.token}

    def for_workers(self, config: FleetConfig, *, here: bool) -> "KnownToken":
        """Return the file that workers read, or the token if they cannot read the file.

        Workers on other hosts can only read ``pools.token_file``, which is on every host.
        """
        if self.file and (here or config.pools.token_file):
            return KnownToken("", self.file)
        return KnownToken(self.token, "")


def given_token(config: FleetConfig | None = None) -> KnownToken | None:
    """Return the token that the fleet file or the environment sets, if one does."""
    if config is not None and config.pools.token_file:
        return _of_file(config.pools.token_file)
    if (token := os.environ.get(TOKEN_VARIABLE)) is not None:
        return KnownToken(tokens_in(token, TOKEN_VARIABLE)[0], "")
    if (named := os.environ.get(FILE_VARIABLE)) is not None:
        return _of_file(os.path.abspath(named))  # noqa: PTH100 - resolve links at each read
    return None


def fleet_token(name: str, config: FleetConfig | None = None) -> KnownToken:
    """Return the token of a fleet that starts here; the first start makes and stores one."""
    if (given := given_token(config)) is not None:
        return given
    file = state_folder(name) / "fleet.token"
    if not file.exists() or not file.stat().st_size:  # a full disk leaves an empty one
        replace_file(file, secrets.token_urlsafe(32).encode(), durable=True)
    return _of_file(str(file))


def _of_file(file: str) -> KnownToken:
    return KnownToken(read_tokens(file)[0], file)
