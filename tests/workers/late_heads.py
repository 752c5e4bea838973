"""A worker whose KV of a head is late: ``python -m tests.workers.late_heads``"""

import asyncio
from collections.abc import AsyncIterator

from batonpb import prefill_pb2 as pb

import fleet.worker.worker
from kvtransfer.pool_source import PoolSource, Room

LATE_S = 0.6  # of each pull; its budget is a second
LATE_HEAD = 2


async def frames_late(
    source: PoolSource, request: pb.PullRequest, room: Room
) -> AsyncIterator[int]:
    """Instead of ``PoolSource.frames``."""
    if any(0 <= LATE_HEAD - one.head_begin < one.head_count for one in request.kv_slices):
        await asyncio.sleep(LATE_S)
    async for size_bytes in _frames(source, request, room):
        yield size_bytes


if __name__ == "__main__":
    _frames = PoolSource.frames
    PoolSource.frames = frames_late  # type: ignore[method-assign]
    fleet.worker.worker.main()
