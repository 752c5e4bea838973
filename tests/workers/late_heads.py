"""A worker that sends the KV of one head late: ``python -m tests.workers.late_heads``."""

import asyncio
from collections.abc import AsyncIterator

from batonpb import prefill_pb2 as pb

from fleet.worker import main
from kvtransfer.pool_source import PoolSource
from kvtransfer.transport import Room

LATE_S = 1.0
LATE_HEAD = 2


async def frames_late(
    source: PoolSource, request: pb.PullRequest, room: Room
) -> AsyncIterator[int]:
    """Instead of ``PoolSource.frames``."""
    if any(kv_slice.head_begin == LATE_HEAD for kv_slice in request.kv_slices):
        await asyncio.sleep(LATE_S)
    async for size_bytes in _frames(source, request, room):
        yield size_bytes


if __name__ == "__main__":
    _frames = PoolSource.frames
    PoolSource.frames = frames_late  # type: ignore[method-assign]
    main()
