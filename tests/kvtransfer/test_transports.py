"""The transport seam: who pulls knows no gRPC, and a table says which transports there are."""

from collections.abc import AsyncIterator

import grpc.aio
import pytest
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from kvtransfer.transport import TransportError, TransportGoneError
from kvtransfer.transports import TRANSPORTS, transport_to
from wire.grpc_channels import Channels


async def frames(request: pb.PullRequest) -> AsyncIterator[bytes]:
    for kv_slice in request.kv_slices:
        if kv_slice.layer_begin == 9:
            raise ValueError("the sender breaks")
        yield b"frame %d" % kv_slice.layer_begin


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_frames_come_in_order_then_an_end_and_a_break_is_typed(name):
    kind, server, channels = TRANSPORTS[name], grpc.aio.server(), Channels()
    kind.serve(server, frames)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = PrefillTarget(worker_id="prefill-0", address=f"127.0.0.1:{port}")
    transport = kind.connect(channels, "token")
    assert transport_to(peer, [transport]) is transport
    try:
        pull = transport.pull(
            peer, pb.PullRequest(kv_slices=[pb.KvSlice(layer_begin=n) for n in (1, 2)])
        )
        assert [await pull.read() for _ in range(3)] == [b"frame 1", b"frame 2", None]
        pull.close()
        pull = transport.pull(
            peer, pb.PullRequest(kv_slices=[pb.KvSlice(layer_begin=n) for n in (1, 9)])
        )
        assert await pull.read() == b"frame 1"
        with pytest.raises(TransportGoneError):
            await pull.read()
        pull = transport.pull(peer, pb.PullRequest(kv_slices=[pb.KvSlice(layer_begin=9)]))
        await channels.forget(peer.address)
        with pytest.raises(TransportGoneError):
            await pull.read()
    finally:
        await transport.close()
        await channels.close()
        await server.stop(None)


def test_a_peer_that_no_transport_reaches_is_named():
    with pytest.raises(TransportError, match="no transport reaches prefill-0"):
        transport_to(PrefillTarget(worker_id="prefill-0"), [])
