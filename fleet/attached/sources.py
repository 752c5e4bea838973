"""Sources of attached servers: the fleet file, a DNS name, or a file that changes."""

import asyncio
import socket
from collections.abc import Sequence
from functools import cache
from urllib.parse import urlsplit

import msgspec
from pydantic import ValidationError

from baton.config.attached import SERVERS, AttachedServer, AttachedServers, refuse_repeated
from baton.config.secrets import SecretError, read_text
from baton.config.section import problem_of
from baton.config.watched_files import WatchedFiles
from baton.config.yaml_text import YamlTextError, dotted, parse_yaml
from baton.folders import read_small
from baton.registry.types import Role

_EMPTY_LOOKUPS = 15  # one after another, every 2 s, that do not count


class ServerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Server as its source describes it.

    Attributes:
        address: Address to connect to, one of several of the URL's host; empty: the host.
        events: ZeroMQ endpoints of its KV events, each with the one that repeats them, or "";
            None: those of vLLM's default are tried.
        problem: Reason why it takes no requests, such as a key that cannot be read.
    """

    url: str
    address: str
    role: Role
    events: tuple[tuple[str, str], ...] | None
    key: str
    label: str
    drain: bool
    problem: str = ""

    @property
    def name(self) -> str:
        """Name that no other server of the source has."""
        return f"{self.url} {self.address}"

    @property
    def host(self) -> str:
        """Host or address of the server."""
        return self.address or urlsplit(self.url).hostname or ""


class ServerSource:
    """Source of servers, which is read every few seconds.

    Raises:
        OSError, ValueError: Its file cannot be used.
    """

    def __init__(self, config: AttachedServers) -> None:
        self._servers = config.list or ()
        self._dns = config.dns
        self._known = KnownAddresses()
        self._file: WatchedFiles[tuple[AttachedServer, ...]] | None = None
        if (file := config.file) is not None:
            self._file = WatchedFiles((file,), lambda: read_servers(file))

    async def read(self) -> Sequence[ServerEntry]:
        """Return the present servers. A wrong file leaves the last good list in use.

        Raises:
            OSError, ValueError: The source cannot be read; the servers stay as they are.
        """
        if self._dns is not None:
            present = self._known.take(await _addresses(self._dns))
            return [entry_of(self._dns, address) for address in present]
        servers = self._servers if self._file is None else self._file.current
        return [entry_of(server) for server in servers]


class KnownAddresses:
    """Addresses of a name: the IPv4 ones, as servers with both families have an address of each.

    A lookup without addresses of the family in use counts once that lasts: a name server that
    restarts may know none, or those of the other family.
    """

    def __init__(self) -> None:
        self._present: list[str] = []
        self._empty_lookups = 0

    def take(self, found: Sequence[str]) -> list[str]:
        """Return the addresses of servers, after a lookup."""
        in_use = self._present or sorted(found, key=lambda one: ":" in one)
        of_family = [one for one in found if (":" in one) == (":" in in_use[0])]
        self._empty_lookups = 0 if of_family else self._empty_lookups + 1
        if of_family:
            self._present = sorted(of_family)
        elif self._empty_lookups > _EMPTY_LOOKUPS:
            self._present = sorted(found)  # of the other family
        return self._present


async def _addresses(server: AttachedServer) -> Sequence[str]:
    """Return the addresses that a server's host name has now."""
    host = urlsplit(server.url).hostname
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            return []  # a headless service without ready pods
        raise
    return list({str(address[4][0]) for address in found})


def read_servers(file: str) -> tuple[AttachedServer, ...]:
    """Return the servers in a YAML file, which has them in a list, `servers`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a list of servers.
    """
    text = read_small(file).decode()
    try:
        parsed = parse_yaml(text, "a file of servers", lambda path: path)
        given = parsed.data.get("servers")  # an empty file may be half written: it is no list
        if parsed.data.keys() != {"servers"} or not isinstance(given, list):
            raise ValueError("must have only the key `servers`, a list (`[]`: none)")
        servers = SERVERS.validate_python(tuple(given))
        refuse_repeated(servers)
    except YamlTextError as error:
        raise ValueError(f"{file}:{error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file}: servers{dotted(first['loc'])}: {problem_of(first)}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return servers


@cache
def _key_in(file: str) -> WatchedFiles[str]:
    """Return the key in a file. While the file is wrong, the last good key stays in use."""

    def read() -> str:
        key = read_text(file, "the key of a server").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise SecretError(f"the key of a server must be one line of ASCII: {file} has none")
        return key

    return WatchedFiles((file,), read)


def entry_of(server: AttachedServer, address: str = "") -> ServerEntry:
    """Return a server with its key, at one of the addresses of its host."""
    parts = urlsplit(server.url)
    host = address or parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    key = problem = ""
    try:
        key = _key_in(server.key_file).current if server.key_file is not None else ""
    except SecretError as error:
        problem = f"{error}"
    events = None
    if server.events is not None:
        replay = server.replay or ("",) * len(server.events)
        events = tuple(
            (stream.replace("*", shown), again.replace("*", shown))
            for stream, again in zip(server.events, replay, strict=True)
        )
    port = f":{parts.port}" if parts.port else ""
    return ServerEntry(
        url=server.url,
        address=address,
        role=server.role,
        events=events,
        key=key,
        label=server.label or f"{shown}{port}{parts.path}",
        drain=server.drain,
        problem=problem,
    )
