"""What operators asked of a running fleet beyond its file, so that a new controller knows it."""

import msgspec

from baton.registry.redis_store import Registry

_TTL_MS = 7 * 24 * 3600 * 1000


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and nodes, asked of a fleet that was started with a certain file.

    Attributes:
        of: Digest of what the fleet was started with: another file is another wish.
        pools: Replicas by role.
        closed_nodes: Node addresses where nothing is placed.
        drained: Workers that stay down until they are restarted.
    """

    of: str
    pools: dict[str, int] = {}
    closed_nodes: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()


async def read(registry: Registry, of: str) -> Wanted:
    """What was asked of the fleet that was started with ``of``.

    Of one that was started with another file the sizes do not count: that file has its own.

    Raises:
        RegistryUnavailableError: Redis does not answer.
    """
    (raw,) = await registry.send(("GET", registry.key("wanted")))
    if raw is not None:
        try:
            found = msgspec.msgpack.decode(raw, type=Wanted)
        except msgspec.DecodeError as error:
            registry.skip("wanted", str(error))
        else:
            if found.of == of:
                return found
            return Wanted(of=of, closed_nodes=found.closed_nodes, drained=found.drained)
    return Wanted(of=of)


async def write(registry: Registry, wanted: Wanted) -> None:
    """Keep it for a week from now.

    Raises:
        RegistryUnavailableError: Redis does not answer.
    """
    raw = msgspec.msgpack.encode(wanted)
    await registry.send(("SET", registry.key("wanted"), raw, "PX", _TTL_MS))


async def forget(registry: Registry) -> None:
    """The fleet ends: the next one begins as its file says.

    Raises:
        RegistryUnavailableError: Redis does not answer.
    """
    await registry.send(("DEL", registry.key("wanted")))
