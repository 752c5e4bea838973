"""Sizes and nodes that operators set at run time, so that a new controller learns them.

Every call may raise the registry's ``RegistryUnavailableError``.
"""

import msgspec

from baton.registry.redis_store import Registry
from baton.registry.router_demands import Sleep

_TTL_MS = 7 * 24 * 3600 * 1000


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Settings made at run time, for a fleet that was started with a certain file."""

    of: str  # digest of the fleet file; the sizes do not apply to another file
    pools: dict[str, int] = {}  # replicas by role
    closed_nodes: tuple[str, ...] = ()  # addresses of nodes that take no workers
    drained: tuple[str, ...] = ()  # workers that stay down until they are restarted
    auto: bool | None = None  # the planner acts; None: the default
    asleep: Sleep = ""


async def read(registry: Registry, of: str) -> Wanted:
    """Return the settings for the fleet file with digest ``of``.

    Sizes that were set for another file do not apply, since that file has its own.
    """
    (raw,) = await registry.send(("GET", registry.key("wanted")))
    wanted = registry.decoded("wanted", raw, Wanted) or Wanted(of=of)
    if wanted.of == of:
        return wanted
    nodes = wanted.closed_nodes
    return Wanted(of=of, closed_nodes=nodes, drained=wanted.drained, auto=wanted.auto)


async def write(registry: Registry, wanted: Wanted) -> None:
    """Store the settings for a week."""
    raw = msgspec.msgpack.encode(wanted)
    await registry.send(("SET", registry.key("wanted"), raw, "PX", _TTL_MS))


async def forget(registry: Registry) -> None:
    """Delete the settings at the end of a fleet: the next one follows its file."""
    await registry.send(("DEL", registry.key("wanted")))
