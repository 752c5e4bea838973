"""Connections from a worker to the ranks of its replica that run as separate programs."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec
from batonpb import rank_pb2

from baton.engine.process.messages import Ready
from baton.engine.settings import EngineSettings
from baton.types.errors import InternalError
from baton.wire.compatibility import kv_group
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from fleet.ports import free_port
from fleet.worker.settings import WorkerSettings
from kvtransfer.ranks.link import RankGoneError, RankLink


async def open_links(
    settings: WorkerSettings,
    token: FleetToken,
    note_sent: Callable[[int], None],
    undo: AsyncExitStack,
) -> tuple[list[RankLink], EngineSettings]:
    """Connect to all separate ranks; return the links, and engine settings with their ports.

    Raises:
        InternalError: A rank does not respond, or the number of addresses is wrong.
    """
    addresses = settings.rank_addresses
    engine = settings.engine
    if not (addresses or settings.ranks_apart):
        return [], engine
    if not engine.own_pools or len(addresses) != engine.tensor_parallel - 1:
        raise InternalError(
            f"rank_addresses has {len(addresses)} entries; tensor_parallel = "
            f"{engine.tensor_parallel} needs all but the leader's address, and rank_memory own"
        )
    channels = Channels()
    undo.push_async_callback(channels.close)
    links = []
    for number, address in enumerate(addresses, 1):
        link = RankLink(number, address, channels.to(address), token, note_sent)
        undo.push_async_callback(link.close)
        links.append(link)
    try:
        orders = [await link.begin(msgspec.json.encode(engine)) for link in links]
    except (RankGoneError, TimeoutError) as error:
        raise InternalError(str(error) or "a rank does not respond") from error
    meeting_port = free_port(settings.host, settings.ports)
    return links, msgspec.structs.replace(
        engine, rank_orders=tuple(orders), rank_meeting_port=meeting_port
    )


async def serve_links(
    links: Sequence[RankLink], ready: Ready, incarnation: bytes, unsigned_pulls: bool
) -> None:
    """Start serving KV from the pool of each rank.

    Raises:
        InternalError: A rank does not respond.
    """
    serve = rank_pb2.RankServe(
        num_blocks=ready.geometry.num_blocks,
        kv_group=kv_group(ready.geometry),
        ranks=len(links) + 1,
        incarnation=incarnation,
        unsigned_pulls=unsigned_pulls,
    )
    try:
        for link in links:
            await link.serve(serve)
    except (RankGoneError, TimeoutError) as error:
        raise InternalError(str(error) or "a rank does not respond") from error
