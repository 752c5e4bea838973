"""Check of an external Redis before a fleet uses it."""

import asyncio
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError

from baton.registry.connection import RedisTarget, RedisUrlError, open_redis, parse_redis_url
from fleet.local.redis_server import RedisError

MINIMUM_VERSION = (6, 2)
_LIMIT_S = 5.0
_TRIAL_MS = 1000
_RULE = "ACL SETUSER NAME on >PASSWORD ~baton:* +@all -@admin -@dangerous +info"


def redacted(url: str) -> str:
    """Return a URL without its password, for messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)


async def check_external(url: str, fleet: str = "check") -> str:
    """Try an external Redis with the commands that a fleet sends; return its name and version.

    Raises:
        RedisError: The server cannot be used; the message has the reason and the fix.
    """
    try:
        target = parse_redis_url(url)
        client = open_redis(url, max_connections=1)
    except RedisUrlError as error:
        raise RedisError(f"redis = {redacted(url)}: {error}") from error
    try:
        async with asyncio.timeout(_LIMIT_S):
            name, version = await _identity(client)
            await _refuse_cluster(client)
            await _try_out(client, fleet)
    except (TimeoutError, redis.RedisError, OSError, ValueError) as error:
        why = _explained(error, target)
        raise RedisError(f"redis = {redacted(url)}: {why}") from error
    finally:
        await client.aclose()
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise RedisError(f"redis = {redacted(url)}: version {version} is too old, 6.2 is needed")
    return f"{name} {version}"


async def _identity(client: redis.asyncio.Redis) -> tuple[str, str]:
    info = await client.info("server")
    name = info.get("server_name", "redis")
    return str(name), str(info.get(f"{name}_version", info["redis_version"]))


async def _refuse_cluster(client: redis.asyncio.Redis) -> None:
    if (await client.info("cluster")).get("cluster_enabled"):
        raise RedisUrlError(
            "the server is a node of a Redis Cluster, which spreads a fleet's keys over nodes: use "
            "one server, or a primary with replicas and Sentinels (redis+sentinel://…)"
        )


async def _try_out(client: redis.asyncio.Redis, fleet: str) -> None:
    """Send each command of a fleet once, to keys that are deleted at once."""
    key = f"baton:{{{fleet}}}:check"
    several = [f"{key}:{n}" for n in range(4)]
    async with client.pipeline(transaction=True) as pipe:
        pipe.execute_command("SET", key, "1", "PX", _TRIAL_MS)
        pipe.execute_command("INCRBY", key, 1)
        pipe.execute_command("HSET", several[0], "a", 1)
        pipe.execute_command("SADD", several[1], "a")
        pipe.execute_command("ZADD", several[2], 1, "a")
        pipe.execute_command("XADD", several[3], "MINID", "~", 1, "*", "a", 1)
        pipe.execute_command("EVAL", "return redis.call('TIME')[1]", 1, key)
        pipe.execute_command("UNLINK", key, *several)
        await pipe.execute()


def _explained(error: Exception, target: RedisTarget) -> str:
    text = str(error)
    if isinstance(error, RedisUrlError):
        return text
    if isinstance(error, NoPermissionError) or "no permissions" in text:
        return f"the user lacks permissions ({text}); this rule suffices: {_RULE}"
    if any(isinstance(cause, AuthenticationError) for cause in _causes(error)):
        return (
            f"the server rejects the user or the password ({text}); set them as "
            "redis://USER:PASSWORD@HOST:6379/0, with an empty USER for the server's own password"
        )
    if isinstance(error, MasterNotFoundError):
        if " : " in text:
            return f"none of {target} responds ({text}); start them, or correct the hosts"
        return f"the Sentinels have no live primary named {target.primary!r}"
    if isinstance(error, ReadOnlyError) or "previous master is now a slave" in text:
        return f"{target} is a replica: set the primary, or its Sentinels (redis+sentinel://…)"
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)):
        return (
            f"the server's certificate is not trusted ({text}): set ca_file to its CA; the "
            "certificate must name the host of the URL"
        )
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)) or (
        target.tls and isinstance(error, redis.ConnectionError) and "closed" in text
    ):
        return f"the TLS handshake failed ({text}): use redis:// for a server without TLS"
    hint = "; use rediss:// for a server with TLS"
    if target.tls:
        hint = "; use redis:// for a server without TLS"
    return (
        f"{target} cannot be reached ({text or type(error).__name__}); start it, correct `redis:` "
        f"in the fleet file, or set it to `embedded`{'' if target.path else hint}"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
