"""What a decode worker takes for the death of a prefill worker, and which channels it keeps."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from batonpb import common_pb2, prefill_pb2_grpc
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from decode_worker.peers import PeerGoneError, PeerRefusedError, Peers
from wire.fleet_token import FleetToken


class Answering(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation

    async def Handshake(self, request, context):
        identity = common_pb2.WorkerIdentity(incarnation=self.incarnation)
        return pb.HandshakeReply(identity=identity)


@contextlib.asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    made = Peers(common_pb2.Capabilities(), FleetToken("token"))
    try:
        yield made
    finally:
        await made.close()


async def life(incarnation: bytes) -> tuple[grpc.aio.Server, PrefillTarget]:
    """A prefill worker called p that lives, and how it is named."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    prefill_pb2_grpc.add_PrefillServicer_to_server(Answering(incarnation), server)
    await server.start()
    address = f"127.0.0.1:{port}"
    return server, PrefillTarget(worker_id="p", incarnation=incarnation, address=address)


async def test_a_refused_connection_and_another_incarnation_are_deaths() -> None:
    async with peers() as ours:
        server, target = await life(b"1")
        await ours.greet(target)
        other = PrefillTarget(worker_id="p", incarnation=b"0", address=target.address)
        with pytest.raises(PeerGoneError, match="restarted"):
            await ours.greet(other)
        await server.stop(None)
        with pytest.raises(PeerGoneError):
            await ours.greet(target, again=True)


async def test_a_connection_that_breaks_is_no_death() -> None:
    """Suspicion b: UNAVAILABLE says that a connection broke, not that a process ended."""
    accepted = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = PrefillTarget(worker_id="p", incarnation=b"1", address=f"127.0.0.1:{port}")
    async with peers() as ours, asyncio.timeout(5):
        with pytest.raises(PeerRefusedError):
            await ours.greet(target)
    assert accepted
    server.close()


async def test_an_address_that_nobody_answers_is_no_death() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        target = PrefillTarget(worker_id="p", incarnation=b"1", address=address)
        async with peers() as ours, asyncio.timeout(5):
            with pytest.raises(PeerRefusedError):
                await ours.greet(target)


async def test_a_life_that_was_replaced_leaves_no_channel_behind() -> None:
    """Suspicion d: one for each life that died while nothing was asked of it."""
    async with peers() as ours:
        for number in range(5):
            server, target = await life(bytes([number]))
            await ours.greet(target)
            await server.stop(None)
        assert len(ours._channels._by_address) == 1
        assert len(ours._greeted) == 1
