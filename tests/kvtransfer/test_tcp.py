"""What only TCP can do wrong: connections that are kept, cut, or come from strangers."""

import asyncio
import contextlib
import socket

import pytest
from batonpb import prefill_pb2 as pb

from kvtransfer.tcp.frames import LENGTH, MOST_FRAME_BYTES, MOST_MESSAGE_BYTES, NAME, framed
from kvtransfer.tcp.pulling import TcpTransport
from kvtransfer.tcp.sending import TcpServer
from kvtransfer.transport import Peer, ServingSide, TransportError
from tests.kvtransfer.edge_ends import (
    TOKEN,
    ReadingEnd,
    SendingEnd,
    end_process,
    pull_request,
    reading_end,
    slices,
)
from wire.fleet_token import FleetToken
from wire.grpc_channels import Channels


def port_of(peer: Peer) -> int:
    offer = peer.offer(NAME)
    assert offer is not None
    return int(offer.address)


def idle(ours: ReadingEnd) -> list[socket.socket]:
    return [link for _, link in ours.transport._idle]


async def test_a_connection_is_kept_for_the_next_pull() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        assert set(await ours.fetch(peer, slices())) == {None}
        (first,) = idle(ours)
        assert set(await ours.fetch(peer, slices()[:2])) == {None}
        assert idle(ours) == [first]


async def test_pulls_at_once_have_a_connection_each() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        pulls = [
            ours.transport.pull(peer, pull_request(slices(), peer.target.incarnation))
            for _ in range(3)
        ]
        assert [len(await pull.read()) for pull in pulls] == [1, 1, 1]
        assert not idle(ours)
        for pull in pulls:
            count = 1
            while await pull.read():
                count += 1
            assert count == len(slices())
            pull.close()
        assert len(idle(ours)) == 3


async def test_a_pull_that_is_left_takes_its_connection_along() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        pull = ours.transport.pull(peer, pull_request(slices(), peer.target.incarnation))
        assert await pull.read()
        pull.close()
        assert await pull.read() == []
        assert not idle(ours)
        assert set(await ours.fetch(peer, slices())) == {None}, "and the next one is whole"


async def test_a_kept_connection_whose_sender_died_is_not_believed() -> None:
    async with reading_end(NAME) as ours, end_process("send") as end:
        assert await ours.fetch(end.peer, slices()[:1]) == [None]
        assert len(idle(ours)) == 1
        end.process.kill()
        await end.process.wait()
        for _ in range(2):
            with pytest.raises(TransportError):
                await ours.read(end.peer, slices())
        assert not idle(ours)


HELLO = pb.PoolAttach(fleet_token=TOKEN)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(MOST_MESSAGE_BYTES + 1),
        LENGTH.pack(8) + b"\xff" * 8,
        framed(pb.PoolRequest(attach=pb.PoolAttach(fleet_token="guess"))),
        framed(pb.PoolRequest(attach=HELLO)),  # of no life
    ],
    ids=["http", "too long", "garbage", "another token", "another life"],
)
async def test_strangers_get_nothing_and_disturb_nobody(said: bytes) -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer))
        request = pull_request(slices(), peer.target.incarnation)
        writer.write(said + framed(pb.PoolRequest(pull=request)))
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        assert set(await ours.fetch(peer, slices())) == {None}


async def test_a_length_that_no_frame_has_ends_the_connection() -> None:
    """From something that is no worker, behind a port that was one's."""

    over = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LENGTH.pack(MOST_FRAME_BYTES + 1))
        writer.close()
        await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, SendingEnd().served() as peer, reading_end(NAME) as ours:
        port = server.sockets[0].getsockname()[1]
        peer.offer(NAME).address = str(port)
        with pytest.raises(TransportError, match="a frame of"):
            await ours.read(peer, slices())
        assert not idle(ours)
        await over.wait()


async def test_without_a_listener_there_is_no_offer() -> None:
    server = TcpServer(ServingSide(None, FleetToken(TOKEN), b"", -1))
    assert server.offer is None
    await server.start(SendingEnd().source)
    await server.close()


async def test_a_reader_with_tls_does_not_pull_in_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        assert ours.transport.reaches(peer)
        monkeypatch.setattr(Channels, "encrypted", True)
        assert not TcpTransport(ours.channels, FleetToken(TOKEN)).reaches(peer)
