"""Hand-offs whose KV ranks on other hosts hold: these learn of it, serve it, and give it back."""

import asyncio
from collections.abc import Callable

from batonpb import rank_pb2

from kvtransfer.kv_slice import KvSlice
from kvtransfer.ranks.pools import KvPools
from prefill_worker.handoff import Handoff


class RankPools:
    """The pools of a worker's ranks, as hand-offs use them.

    Args:
        pool: The KV pool of this host, with the links to those elsewhere.
    """

    def __init__(self, pool: KvPools) -> None:
        self._pool = pool

    def hold(self, handoff: Handoff, on_read_ended: Callable[[], None]) -> None:
        """Let each rank read its own pages for decode.

        Until a rank is done with the pages, they count as being read.

        Args:
            handoff: The hand-off, whose pages the engine has admitted.
            on_read_ended: Called for each rank that is done.
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
        """Tell the rank that decode will ask; None if decode will ask this host."""
        if self._pool.holding(kv_slice):
            return None
        link = self._pool.elsewhere(kv_slice)[0]
        return link.publish(handoff.engine_id, kv_slice.to_wire())

    def revoke(self, handoff: Handoff) -> None:
        """Take the hand-off back from all ranks that know of it."""
        links = handoff.at_ranks
        handoff.at_ranks = []
        for link in links:
            link.revoke(handoff.engine_id)
