"""Hand-offs whose KV is held by ranks on other hosts, which serve and release their part."""

import asyncio
from collections.abc import Callable

from batonpb import rank_pb2

from kvtransfer.kv_slice import KvSlice
from kvtransfer.ranks.pools import KvPools
from prefill_worker.handoff import Handoff


class RankPools:
    """Pools of a worker's ranks: that of this host, and links to those of other hosts."""

    def __init__(self, pool: KvPools) -> None:
        self._pool = pool

    def hold(self, handoff: Handoff, on_read_ended: Callable[[], None]) -> None:
        """Let each rank serve its own pages of an admitted hand-off to decode.

        Until a rank is done with the pages, they count as being read; then it calls back.
        """
        start = handoff.start
        handoff.at_ranks = list(self._pool.links)
        for link in handoff.at_ranks:
            handoff.machine.read_begins()
            hold = rank_pb2.RankHold(
                name=handoff.engine_id,
                request_id=start.request_id,
                attempt=start.attempt,
                generation=start.generation,
                prompt_tokens=handoff.machine.prompt_tokens,
                pages=handoff.machine.blocks,
                decode_incarnation=start.decode_incarnation,
            )
            link.hold(hold, on_read_ended)
        if not handoff.is_open:
            self.revoke(handoff)

    def publish(self, handoff: Handoff, kv_slice: KvSlice) -> "asyncio.Future[None] | None":
        """Notify the rank that decode will pull from; None if decode will pull from this host."""
        if self._pool.holding(kv_slice):
            return None
        link = self._pool.elsewhere(kv_slice)[0]
        return link.publish(handoff.engine_id, kv_slice.to_wire())

    def revoke(self, handoff: Handoff) -> None:
        """Revoke the hand-off at all ranks that have it."""
        links = handoff.at_ranks
        handoff.at_ranks = []
        for link in links:
            link.revoke(handoff.engine_id)
