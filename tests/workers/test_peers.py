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

from baton.wire.fleet_token import FleetToken
from decode_worker.peers import PeerGoneError, PeerRefusedError, Peers


class Answering(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, incarnation: bytes) -> None:
        self.incarnation = incarnation
        self.asked = asyncio.Semaphore(0)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.breaks_off: list[grpc.StatusCode] = []

    async def Handshake(self, request, context):
        self.asked.release()
        if self.breaks_off:
            await context.abort(self.breaks_off.pop(), "the worker ends")
        await self.may_answer.wait()
        identity = common_pb2.WorkerIdentity(incarnation=self.incarnation)
        return pb.HandshakeReply(identity=identity)


@contextlib.asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    made = Peers(common_pb2.Capabilities(), FleetToken("token"))
    try:
        yield made
    finally:
        await made.close()


async def life(
    incarnation: bytes, servicer: Answering | None = None
) -> tuple[grpc.aio.Server, PrefillTarget]:
    """A prefill worker called p that lives, and how it is named."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer or Answering(incarnation), server)
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


@pytest.mark.parametrize("dies", [True, False])
async def test_a_handshake_whose_channel_another_closes_is_asked_again(dies: bool) -> None:
    """Two hand-offs lose one peer: the first to know it closes the channel under the second.

    That one took it for its own cancellation, and told nobody until the stall limit of 10 s.
    """
    servicer = Answering(b"1")
    async with peers() as ours, asyncio.timeout(5):
        server, target = await life(b"1", servicer)
        servicer.may_answer.clear()
        second = asyncio.create_task(ours.greet(target, again=True))
        await servicer.asked.acquire()
        if dies:
            stopping = asyncio.create_task(server.stop(None))
            await asyncio.sleep(0)
        servicer.may_answer.set()
        await ours._forget(target.address)
        if dies:
            with pytest.raises(PeerGoneError):
                await second
            await stopping
        else:
            await second
            await server.stop(None)


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE])
async def test_a_handshake_that_the_peer_breaks_off_is_asked_again(code: grpc.StatusCode) -> None:
    """A worker breaks calls off when it ends, and may have restarted by the next attempt."""
    servicer = Answering(b"1")
    servicer.breaks_off = [code]
    async with peers() as ours, asyncio.timeout(5):
        server, target = await life(b"1", servicer)
        await ours.greet(target)
        assert servicer.breaks_off == []
        await server.stop(None)


async def test_a_handshake_that_is_cancelled_ends() -> None:
    servicer = Answering(b"1")
    async with peers() as ours, asyncio.timeout(5):
        server, target = await life(b"1", servicer)
        servicer.may_answer.clear()
        asking = asyncio.create_task(ours.greet(target))
        await servicer.asked.acquire()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await server.stop(None)


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
