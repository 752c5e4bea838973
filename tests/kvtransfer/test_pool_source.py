"""What a reader may ask the sending side for."""

import pytest
from batonpb import prefill_pb2 as pb

from kvtransfer import chunk, pool_source
from kvtransfer.chunk import GoneError
from tests.kvtransfer.edge_ends import GEOMETRY, KEY, OURS, SendingEnd, pull_request, slices


async def test_a_frame_above_the_limit_is_refused_before_there_is_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = SendingEnd()
    small = slices()[-1]
    large = slices()[0]
    sizes = [each.payload_bytes(GEOMETRY) for each in (large, small)]
    assert sizes[0] > sizes[1]
    monkeypatch.setattr(pool_source, "MOST_FRAME_BYTES", sizes[0])
    taken: list[bytearray] = []

    async def room(size_bytes: int) -> memoryview:
        taken.append(bytearray(size_bytes))
        return memoryview(taken[-1])

    request = pull_request([large, small], end.incarnation)
    frames = [bytes(taken[-1][:size]) async for size in end.source.frames(request, room)]
    assert max(map(len, taken)) < sizes[0]
    view = chunk.PoolView(bytearray(GEOMETRY.pool_bytes), GEOMETRY)
    bound = chunk.binding(*KEY, end.incarnation)
    with pytest.raises(GoneError, match="limit"):
        chunk.ByteFrame(frames[0], pb.PullRequest().encoding).store(view, OURS, large, bound)
    chunk.ByteFrame(frames[1], pb.PullRequest().encoding).store(view, OURS, small, bound)
