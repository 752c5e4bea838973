"""How a fleet reaches its Redis. One URL says all of it.

    redis://USER:PASSWORD@HOST:6379/0
    rediss://USER@HOST:6379/0?ca_file=FILE&password_file=FILE            by TLS
    redis+sentinel://HOST:26379,HOST:26379,HOST:26379/NAME?db=0          the primary called NAME
    rediss+sentinel://…                                                  Sentinel and Redis by TLS
    unix:///run/redis.sock?db=0

    ca_file            PEM file of who signed the server's certificate; the system's otherwise
    cert_file          PEM files of our own certificate and key, for servers that ask for one
    key_file
    password_file      a file that holds the password: it is read for every connection anew, so that
                       a new password needs no restart
    password_env       an environment variable that holds it
    db                 number of the database, where the path does not say it
    sentinel_user      of the Sentinels, where they have users or a password of their own
    sentinel_password_file, sentinel_password_env

User and password before the ``@`` are the server's. The files are read on every host of the fleet,
so their paths must be absolute.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio
from redis.asyncio.connection import (
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

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
_TLS_FILES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
_SECRETS = ("password_file", "password_env")
_OF_SENTINELS = ("sentinel_user", "sentinel_password_file", "sentinel_password_env")
_PORT = 6379
_SENTINEL_PORT = 26379
_CONNECT_S = 2.0
_SENTINEL_S = 0.5  # each: one that is away must not use up the time of the others


class RedisUrlError(ValueError):
    """The URL of Redis cannot be used; the message says what to change, and holds no password."""


class RedisTarget(NamedTuple):
    """What a URL means.

    Attributes:
        hosts: Of the server, or of the Sentinels; none for a socket.
        path: Of a socket; else empty.
        primary: What the Sentinels call the primary; empty without them.
        options: Of connections to the server, as redis-py names them.
        sentinel_options: The same of those to the Sentinels.
        tls: Whether connections are encrypted.
    """

    hosts: tuple[tuple[str, int], ...]
    path: str
    primary: str
    options: dict[str, Any]
    sentinel_options: dict[str, Any]
    tls: bool

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        where = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.primary!r} of the Sentinels {where}" if self.primary else where


def parse_redis_url(url: str) -> RedisTarget:
    """What a URL means.

    Raises:
        RedisUrlError: It says something that is not possible, or names a file that is not there.
    """
    parts, named = _split(url)
    if parts.scheme not in SCHEMES:
        raise RedisUrlError(f"{parts.scheme or 'nothing'}:// is none of {', '.join(SCHEMES)}")
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    sentinel = parts.scheme.endswith("+sentinel")
    tls = parts.scheme.startswith("rediss")
    _check_names(asked, tls=tls, sentinel=sentinel)
    options = _secret(asked, _SECRETS, _user(parts), "password")
    if parts.password:
        if "credential_provider" in options:
            raise RedisUrlError("it has a password and a password_file or password_env: say one")
        options["password"] = unquote(parts.password)
    files = {_TLS_FILES[name]: _file(asked[name], name) for name in _TLS_FILES if name in asked}
    if parts.scheme == "unix":
        return RedisTarget(
            (), unquote(parts.path), "", {**options, "db": _db(asked, "")}, {}, False
        )
    hosts = _hosts(named, _SENTINEL_PORT if sentinel else _PORT)
    primary = unquote(parts.path).strip("/") if sentinel else ""
    if sentinel and not primary:
        raise RedisUrlError("what the Sentinels call the primary is missing: …/NAME")
    if not sentinel and len(hosts) != 1:
        raise RedisUrlError("several hosts are those of Sentinels: redis+sentinel://…/NAME")
    number = _db(asked, "" if sentinel else unquote(parts.path).strip("/"))
    name = asked.get("sentinel_user", "")
    theirs = _secret(asked, _OF_SENTINELS[1:], name, "sentinel_password")
    options |= {**files, "db": number}
    return RedisTarget(hosts, "", primary, options, {**files, **theirs}, tls)


def open_redis(url: str, max_connections: int = 8) -> redis.asyncio.Redis:
    """A client, which connects when it is used first; calls beyond its connections wait for one.

    A call fails where the server does not answer, and is never tried twice: a MULTI whose first
    try took effect must not be sent again. With Sentinels the next call asks them who is primary.

    Args:
        url: See the module.
        max_connections: At most so many at a time.

    Raises:
        RedisUrlError: The URL cannot be used.
    """
    target = parse_redis_url(url)
    limits: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _CONNECT_S,
        # Its way of timing a write loses a cancel (`asyncio.wait_for` before Python 3.12): a
        # loop that was told to end goes on. Callers have limits of their own instead.
        "socket_timeout": None,
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


class _SentinelPool(BlockingConnectionPool, SentinelConnectionPool):
    """Waits for a connection as the one does, and asks for the primary as the other does."""

    async def aclose(self) -> None:
        """Close the connections to the Sentinels too."""
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


class _Read(CredentialProvider):
    """A password that is read for each connection anew."""

    def __init__(self, user: str, read: Callable[[], str]) -> None:
        self._user = user
        self._read = read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._read()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _secret(
    asked: Mapping[str, str], names: tuple[str, ...], user: str, what: str
) -> dict[str, Any]:
    """User and password as redis-py takes them."""
    given = [name for name in names if name in asked]
    if len(given) > 1:
        raise RedisUrlError(f"{' and '.join(given)} exclude each other")
    if not given:
        return {"username": user} if user else {}
    name = given[0]
    value = asked[given[0]]

    def from_file() -> str:
        try:
            return Path(value).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RedisUrlError(f"{name}: {value} cannot be read ({error})") from error

    def from_environment() -> str:
        found = os.environ.get(value)
        if not found:
            raise RedisUrlError(f"{name}: {value} is not set, or is empty")
        return found

    is_file = name.endswith("_file")
    read = from_file if is_file else from_environment
    if is_file:
        _check_absolute(value, name)
    if not read():  # now, so that a wrong name is told at once
        raise RedisUrlError(f"{name}: the {what} in {value} is empty")
    return {"credential_provider": _Read(user, read)}


def _check_names(asked: Mapping[str, str], *, tls: bool, sentinel: bool) -> None:
    known = {"db", *_SECRETS, *_TLS_FILES, *_OF_SENTINELS}
    for name in asked:
        if name not in known:
            raise RedisUrlError(f"{name} is not known: {', '.join(sorted(known))}")
        if name in _TLS_FILES and not tls:
            raise RedisUrlError(f"{name} is for TLS: say rediss:// or rediss+sentinel://")
        if name in _OF_SENTINELS and not sentinel:
            raise RedisUrlError(f"{name} is for redis+sentinel:// or rediss+sentinel://")
    if ("cert_file" in asked) != ("key_file" in asked):
        raise RedisUrlError("cert_file and key_file go together")


def _check_absolute(path: str, name: str) -> None:
    if not Path(path).is_absolute():
        raise RedisUrlError(f"{name}: {path} must be an absolute path: it is read on every host")


def _file(path: str, name: str) -> str:
    _check_absolute(path, name)
    if not os.access(path, os.R_OK):
        raise RedisUrlError(f"{name}: {path} is not there, or cannot be read")
    return path


def _user(parts: SplitResult) -> str:
    return unquote(parts.username or "")


def _db(asked: Mapping[str, str], path: str) -> int:
    text = asked.get("db", path) or "0"
    if not text.isdigit():
        raise RedisUrlError(f"{text!r} is no number of a database")
    return int(text)


def _split(url: str) -> tuple[SplitResult, str]:
    """The URL without its hosts, and the hosts.

    Some of Python's versions refuse several hosts of which one is in brackets.
    """
    scheme, slashes, rest = url.partition("://")
    places = [rest.find(mark) for mark in "/?#"]
    end = min((place for place in places if place >= 0), default=len(rest))
    user, sign, named = rest[:end].rpartition("@")
    return urlsplit(f"{scheme}{slashes}{user}{sign}{rest[end:]}"), named


def _hosts(named: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for one in named.split(","):
        try:
            split = urlsplit(f"//{one}")
            host = split.hostname
            number = split.port
        except ValueError as error:
            raise RedisUrlError(f"{one}: {error}") from error
        if not host:
            raise RedisUrlError("a host is missing")
        hosts.append((host, port if number is None else number))
    return tuple(hosts)
