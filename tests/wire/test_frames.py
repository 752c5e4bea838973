"""What a router that does not read leaves at its worker, and not in buffers of gRPC."""

import asyncio

import grpc
import grpc.aio
from batonpb import decode_pb2 as pb
from batonpb.decode_pb2_grpc import DecodeServicer, DecodeStub, add_DecodeServicer_to_server

from baton.wire.codecs import gather, scatter
from baton.wire.grpc_options import ROUTER_OPTIONS, WORKER_OPTIONS, open_channel


class Worker(DecodeServicer):
    """Sends a small frame as soon as gRPC takes it."""

    def __init__(self) -> None:
        self.sent = 0

    async def Serve(self, requests, context):
        while True:
            frame = pb.WorkerFrame(step=self.sent)
            frame.tokens.add(request_id="r" * 40, token_ids=b"1234", index=self.sent)
            self.sent += 1
            yield frame
            await asyncio.sleep(0)


async def test_few_frames_are_under_way_to_a_router_that_does_not_read():
    """Hundreds were: each was a turn of the loop, and all of their tokens were a second old."""
    worker = Worker()
    server = grpc.aio.server(options=WORKER_OPTIONS)
    add_DecodeServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", None, ROUTER_OPTIONS)
    call = DecodeStub(channel).Serve()
    first = await call.read()
    assert first.step == 0
    await asyncio.sleep(1)
    unread = worker.sent - 1
    assert unread < 40, unread
    for step in range(1, 200):
        frame = await call.read()
        assert frame.step == step
    call.cancel()
    await channel.close()
    await server.stop(0)


def test_frames_that_were_gathered_come_apart_in_order():
    frames = [pb.RouterFrame(heartbeat=pb.Heartbeat(sequence=number)) for number in range(1, 4)]
    assert gather(frames[:1]) is frames[0]
    assert list(scatter(frames[0])) == frames[:1]
    sent = pb.RouterFrame.FromString(gather(frames).SerializeToString())
    assert list(scatter(sent)) == frames
