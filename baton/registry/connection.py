"""Connections to Redis, configured by one URL.

    redis://USER:PASSWORD@HOST:6379/0
    rediss://USER@HOST:6379/0?ca_file=FILE&password_file=FILE            TLS
    redis+sentinel://HOST:26379,HOST:26379,HOST:26379/NAME?db=0          the primary called NAME
    rediss+sentinel://…                                                  Sentinel and Redis with TLS
    unix:///run/redis.sock?db=0

    ca_file            PEM file of the CA of the server's certificate; default: the system's CAs
    cert_file          PEM files of our own certificate and key, for servers that require one
    key_file
    password_file      a file with the password, read for every new connection, so that a new
                       password needs no restart
    password_env       an environment variable with the password
    db                 database number, unless it is in the path
    sentinel_user      user of the Sentinels, if they have users or a password of their own
    sentinel_password_file, sentinel_password_env

User and password before the ``@`` are the server's. The files are read on every host of the fleet,
so their paths must be absolute.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from baton.addresses import join_address
from baton.folders import read_small
from baton.telemetry.tasks import BackgroundTasks

Command = tuple[Any, ...]

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
_TLS_FILES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
_SECRETS = ("password_file", "password_env")
_OF_SENTINELS = ("sentinel_user", "sentinel_password_file", "sentinel_password_env")
_PORT = 6379
_SENTINEL_PORT = 26379
_CONNECT_S = 2.0
_AGE_S = 300.0  # of a connection, then its name is looked up again
_SOCKET_PATH_BYTES = 107  # Linux
_CALL_LIMIT_S = 3.0
_JOINED_BYTES = 65_536
_BEAT_OFFSET_S = random.random()  # processes of a host do not all write at once
_SENTINEL_S = 0.5  # timeout per Sentinel, so that a dead one leaves time for the others


class RedisUrlError(ValueError):
    """The Redis URL cannot be used; the message has the fix and contains no password."""


class RedisTarget(NamedTuple):
    """Parsed Redis URL.

    Attributes:
        hosts: Addresses of the server, or of the Sentinels; empty for a socket.
    """

    hosts: tuple[tuple[str, int], ...]
    path: str  # path of a socket, or ""
    primary: str  # name of the primary at the Sentinels, or ""
    options: dict[str, Any]  # options for connections to the server, as redis-py names them
    sentinel_options: dict[str, Any]  # options for connections to the Sentinels
    tls: bool  # whether connections are encrypted

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        where = ", ".join(join_address(*host) for host in self.hosts)
        return f"{self.primary!r} of the Sentinels {where}" if self.primary else where


def parse_redis_url(url: str) -> RedisTarget:
    """Parse a Redis URL.

    Raises:
        RedisUrlError: The URL is invalid, or names a missing file.
    """
    parts, named = _split(url)
    if parts.scheme not in SCHEMES:
        raise RedisUrlError(
            f"scheme {parts.scheme or 'nothing'}:// is unknown; use one of {', '.join(SCHEMES)}"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    sentinel = parts.scheme.endswith("+sentinel")
    tls = parts.scheme.startswith("rediss")
    _check_names(query, tls=tls, sentinel=sentinel)
    options = _secret(query, _SECRETS, _user(parts), "password")
    if parts.password:
        if "credential_provider" in options:
            raise RedisUrlError("password and password_file or password_env exclude each other")
        options["password"] = unquote(parts.password)
    files = {_TLS_FILES[name]: _file(query[name], name) for name in _TLS_FILES if name in query}
    if parts.scheme == "unix":
        path = _socket_path(unquote(parts.path))
        return RedisTarget((), path, "", {**options, "db": _db(query, "")}, {}, False)
    hosts = _hosts(named, _SENTINEL_PORT if sentinel else _PORT)
    primary = unquote(parts.path).strip("/") if sentinel else ""
    if sentinel and not primary:
        raise RedisUrlError("the Sentinels' name of the primary is missing: add …/NAME")
    if not sentinel and len(hosts) != 1:
        raise RedisUrlError("several hosts are for Sentinels: use redis+sentinel://…/NAME")
    number = _db(query, "" if sentinel else unquote(parts.path).strip("/"))
    name = query.get("sentinel_user", "")
    theirs = _secret(query, _OF_SENTINELS[1:], name, "sentinel_password")
    options |= {**files, "db": number}
    return RedisTarget(hosts, "", primary, options, {**files, **theirs}, tls)


def open_redis(url: str, max_connections: int = 32) -> redis.asyncio.Redis:
    """Return a client, which connects at its first call; calls wait for a free connection.

    A call fails if the server does not answer, and is never retried: a MULTI that may have taken
    effect must not be sent again. With Sentinels the next call looks up the primary again.
    Connections are replaced every five minutes: the name may lead to another server by then, while
    the old one still takes writes.

    Raises:
        RedisUrlError: The URL cannot be used.
    """
    target = parse_redis_url(url)
    limits: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _CONNECT_S,
        # redis-py's timeout of writes loses a cancellation (`asyncio.wait_for` before Python 3.12),
        # so that a cancelled loop continues. Callers have limits of their own instead.
        "socket_timeout": None,
        "redis_connect_func": _on_connect,
    }
    size = {"max_connections": max_connections, "timeout": _CONNECT_S}
    if target.path:
        pool = BlockingConnectionPool(
            connection_class=UnixDomainSocketConnection,
            path=target.path,
            **{**limits, **target.options, **size},
        )
    elif target.primary:
        return _by_sentinels(target, limits, size)
    else:
        ((host, port),) = target.hosts
        pool = BlockingConnectionPool(
            connection_class=SSLConnection if target.tls else Connection,
            **{"host": host, "port": port, **limits, **target.options, **size},
        )
    return redis.asyncio.Redis.from_pool(pool)


class RoundTrips:
    """Round trips to Redis over one client, made by ``url``.

    With ``joins``, what is sent in one turn of the loop goes in one round trip, for processes with
    many workers. Transactions and large values always go alone.

    Raises:
        RedisUrlError: The URL cannot be used.
    """

    def __init__(self, url: str, *, joins: bool = False) -> None:
        self.client = open_redis(url)
        self._joins = joins
        self._tasks = BackgroundTasks("redis")
        self._waiting: list[tuple[Sequence[Command], asyncio.Future[Sequence[Any]]]] = []

    async def send(self, commands: Sequence[Command], *, atomic: bool) -> Sequence[Any]:
        """Send commands, and return their answers; raises the errors of redis-py."""
        sizes = (len(part) for one in commands for part in one if isinstance(part, bytes))
        if atomic or not self._joins or max(sizes, default=0) > _JOINED_BYTES:
            return await self._execute(commands, atomic=atomic)
        answered: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((commands, answered))
        if len(self._waiting) == 1:
            self._tasks.spawn(self._send_waiting(), "round trip")
        return await answered

    async def close(self) -> None:
        """Close all connections, once what was sent is answered."""
        await self._tasks.settle(_CALL_LIMIT_S)
        await self.client.aclose()

    async def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        commands = [command for of_one, _ in waiting for command in of_one]
        try:
            answers = await self._execute(commands, atomic=False, raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - each caller gets it
            answers = [error] * len(commands)
        each = iter(answers)
        for of_one, answered in waiting:
            own = [next(each) for _ in of_one]
            if answered.done():  # its caller was cancelled
                continue
            if errors := [answer for answer in own if isinstance(answer, Exception)]:
                answered.set_exception(errors[0])
            else:
                answered.set_result(own)

    async def _execute(
        self, commands: Sequence[Command], *, atomic: bool, raise_on_error: bool = True
    ) -> Sequence[Any]:
        async with self.client.pipeline(transaction=atomic) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            async with asyncio.timeout(_CALL_LIMIT_S):
                answers: Sequence[Any] = await pipe.execute(raise_on_error=raise_on_error)
        return answers


def next_beat_s(every_s: float) -> float:
    """Return when, by the loop's clock, whatever this process does so often is due next.

    It falls into one turn of the loop for all workers of the process.
    """
    since_s = asyncio.get_running_loop().time() - _BEAT_OFFSET_S
    return _BEAT_OFFSET_S + (since_s // every_s + 1) * every_s


async def beat(every_s: float) -> None:
    """Sleep until `next_beat_s` of this interval."""
    await asyncio.sleep(next_beat_s(every_s) - asyncio.get_running_loop().time())


async def reconnect(client: redis.asyncio.Redis) -> None:
    """Make the next calls connect anew: behind the same name there may be another server.

    Idle connections are closed, those in use when their call ends.
    """
    pool = client.connection_pool
    with contextlib.suppress(RedisError, OSError, RuntimeError):
        await pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
        await pool.disconnect(inuse_connections=False)


async def _on_connect(connection: AbstractConnection) -> None:
    await connection.on_connect()
    asyncio.get_running_loop().call_later(_AGE_S, connection.mark_for_reconnect)


class _SentinelPool(BlockingConnectionPool, SentinelConnectionPool):
    """Blocking pool of connections to the primary that Sentinels name."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def _by_sentinels(
    target: RedisTarget, limits: Mapping[str, Any], size: Mapping[str, Any]
) -> redis.asyncio.Redis:
    theirs = {**limits, **target.sentinel_options, "ssl": target.tls}
    theirs |= {"socket_connect_timeout": _SENTINEL_S, "socket_timeout": _SENTINEL_S}
    sentinels = Sentinel(target.hosts, sentinel_kwargs=theirs)  # type: ignore[no-untyped-call]
    kind = SentinelManagedSSLConnection if target.tls else SentinelManagedConnection
    pool = _SentinelPool(
        connection_class=kind,
        service_name=target.primary,
        sentinel_manager=sentinels,
        **{**limits, **target.options, **size},
    )
    return redis.asyncio.Redis.from_pool(pool)


class _ReloadedPassword(CredentialProvider):
    # Reads the password for each new connection.

    def __init__(self, user: str, read: Callable[[], str]) -> None:
        self._user = user
        self._read = read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _secret(
    query: Mapping[str, str], names: tuple[str, ...], user: str, what: str
) -> dict[str, Any]:
    given = [name for name in names if name in query]
    if len(given) > 1:
        raise RedisUrlError(f"{' and '.join(given)} exclude each other")
    if not given:
        return {"username": user} if user else {}
    name = given[0]
    value = query[name]

    def from_file() -> str:
        try:
            return read_small(value).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RedisUrlError(f"{name}: {value} cannot be read ({error})") from error

    def from_environment() -> str:
        secret = os.environ.get(value)
        if not secret:
            raise RedisUrlError(f"{name}: {value} is not set, or is empty")
        return secret

    is_file = name.endswith("_file")
    read = from_file if is_file else from_environment
    if is_file:
        _check_absolute(value, name)
    if not read():  # at once, so that a wrong file or variable fails early
        raise RedisUrlError(f"{name}: the {what} in {value} is empty")
    return {"credential_provider": _ReloadedPassword(user, read)}


def _check_names(query: Mapping[str, str], *, tls: bool, sentinel: bool) -> None:
    known = {"db", *_SECRETS, *_TLS_FILES, *_OF_SENTINELS}
    for name in query:
        if name not in known:
            raise RedisUrlError(f"{name} is unknown; use one of {', '.join(sorted(known))}")
        if name in _TLS_FILES and not tls:
            raise RedisUrlError(f"{name} needs TLS: use rediss:// or rediss+sentinel://")
        if name in _OF_SENTINELS and not sentinel:
            raise RedisUrlError(f"{name} needs redis+sentinel:// or rediss+sentinel://")
    if ("cert_file" in query) != ("key_file" in query):
        raise RedisUrlError("cert_file and key_file need each other")


def _check_absolute(path: str, name: str) -> None:
    if not Path(path).is_absolute():
        raise RedisUrlError(f"{name}: {path} must be an absolute path: it is read on every host")


def _socket_path(path: str) -> str:
    if (size := len(os.fsencode(path))) > _SOCKET_PATH_BYTES:
        raise RedisUrlError(
            f"the socket's path has {size} bytes, at most {_SOCKET_PATH_BYTES} are possible: "
            "use a shorter one"
        )
    return path


def _file(path: str, name: str) -> str:
    _check_absolute(path, name)
    if not os.access(path, os.R_OK):
        raise RedisUrlError(f"{name}: {path} does not exist or cannot be read")
    return path


def _user(parts: SplitResult) -> str:
    return unquote(parts.username or "")


def _db(query: Mapping[str, str], path: str) -> int:
    text = query.get("db", path) or "0"
    if not text.isdigit():
        raise RedisUrlError(f"database {text!r} is not a number")
    return int(text)


def _split(url: str) -> tuple[SplitResult, str]:
    """Return the URL without its hosts, and the hosts.

    Some Python versions refuse several hosts if one is in brackets.
    """
    scheme, slashes, rest = url.partition("://")
    places = [rest.find(mark) for mark in "/?#"]
    end = min((place for place in places if place >= 0), default=len(rest))
    user, sign, named = rest[:end].rpartition("@")
    return urlsplit(f"{scheme}{slashes}{user}{sign}{rest[end:]}"), named


def _hosts(named: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for place in named.split(","):
        try:
            split = urlsplit(f"//{place}")
            host = split.hostname
            number = split.port
        except ValueError as error:
            raise RedisUrlError(f"{place}: {error}") from error
        if not host:
            raise RedisUrlError("a host is missing")
        hosts.append((host, port if number is None else number))
    return tuple(hosts)
