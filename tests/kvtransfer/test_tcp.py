"""What only TCP can do wrong: connections that are kept, cut, or come from strangers."""

import asyncio
import contextlib
import errno
import resource
import socket
import tracemalloc
from collections.abc import Iterator

import pytest
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer import tcp
from kvtransfer.hello import GREETING, NONCE_BYTES, PROOF_BYTES, HelloGate, prove_to_reader
from kvtransfer.kv_slice import MOST_FRAME_BYTES
from kvtransfer.tcp import NAME, TcpServer, TcpTransport, address_of
from kvtransfer.transport import (
    LENGTH,
    MOST_MESSAGE_BYTES,
    Peer,
    ServingSide,
    TransportError,
    framed,
)
from tests.kvtransfer.edge_ends import (
    TOKEN,
    ReadingEnd,
    SendingEnd,
    end_process,
    pull_request,
    reading_end,
    slices,
)
from tests.kvtransfer.test_transports import until

GREETING_BYTES = len(GREETING) + NONCE_BYTES


def port_of(peer: Peer) -> int:
    offer = peer.offer(NAME)
    assert offer is not None
    return int(offer.address.partition("/")[0])


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


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        LENGTH.pack(MOST_MESSAGE_BYTES + 1) * 32,
        b"\0" * 64,
        b"\xff" * 1000,
        framed(pb.PoolRequest(attach=pb.PoolAttach(fleet_token=TOKEN))) * 8,  # as it was once
    ],
    ids=["http", "lengths", "zeros", "garbage", "the hello before this one"],
)
async def test_strangers_get_nothing_and_disturb_nobody(said: bytes) -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer))
        request = pull_request(slices(), peer.target.incarnation)
        writer.write(said + framed(pb.PoolRequest(pull=request)))
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert len(await reader.read()) <= GREETING_BYTES
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        assert set(await ours.fetch(peer, slices())) == {None}


async def test_who_has_another_token_or_means_another_life_gets_nothing() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME, "guess") as stranger:
        with pytest.raises(TransportError, match="closed its socket"):
            await stranger.read(peer, slices())
        async with reading_end(NAME) as ours:
            other = PrefillTarget()
            other.CopyFrom(peer.target)
            other.incarnation = b"another"
            with pytest.raises(TransportError, match="closed its socket"):
                await ours.read(Peer(other, peer.capabilities), slices())
            assert set(await ours.fetch(peer, slices())) == {None}


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def knock(port: int) -> socket.socket:
    link = socket.socket()
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
    return link


@pytest.mark.usefixtures("many_descriptors")
async def test_a_stranger_costs_no_memory_that_he_names() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        with contextlib.ExitStack() as undo:
            tracemalloc.start()
            undo.callback(tracemalloc.stop)
            before_bytes, _ = tracemalloc.get_traced_memory()
            for _ in range(40):
                link = undo.enter_context(await knock(port_of(peer)))
                link.send(LENGTH.pack(MOST_MESSAGE_BYTES))
            await asyncio.sleep(0.2)
            _, most_bytes = tracemalloc.get_traced_memory()
            assert most_bytes - before_bytes < 8 << 20, "160 MiB were named"
            assert set(await ours.fetch(peer, slices())) == {None}


@pytest.mark.usefixtures("many_descriptors")
async def test_silent_strangers_do_not_pile_up_and_keep_no_reader_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "HELLO_S", 600.0)
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        with contextlib.ExitStack() as undo:
            links = [undo.enter_context(await knock(port_of(peer))) for _ in range(300)]

            def ended(link: socket.socket) -> bool:
                try:
                    return link.recv(100) == b""
                except BlockingIOError:
                    return False
                except ConnectionResetError:
                    return True

            over: set[socket.socket] = set()

            def few_are_left() -> bool:
                over.update(link for link in links if link not in over and ended(link))
                return len(links) - len(over) <= 64

            await until(few_are_left)
            assert set(await ours.fetch(peer, slices())) == {None}


async def test_a_silent_stranger_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HELLO_S", 0.05)
    async with SendingEnd().served() as peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer))
        async with asyncio.timeout(5):
            assert len(await reader.read()) <= GREETING_BYTES
        writer.close()


async def test_a_moment_without_descriptors_is_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half a minute of silence behind it."""
    loop = asyncio.get_running_loop()
    accept, left = loop.sock_accept, [12]

    async def scarce(listener: socket.socket) -> tuple[socket.socket, object]:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "no descriptors")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", scarce)
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        await until(lambda: not left[0])
        assert set(await ours.fetch(peer, slices())) == {None}


async def test_who_has_the_port_of_a_dead_worker_sees_neither_token_nor_capability() -> None:
    saw = bytearray()

    async def squat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(NONCE_BYTES))
        saw.extend(await reader.readexactly(NONCE_BYTES + PROOF_BYTES))
        writer.write(bytes(PROOF_BYTES))  # it cannot know the right one
        saw.extend(await reader.read())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(squat, "127.0.0.1", 0)
    async with server, SendingEnd().served() as peer, reading_end(NAME) as ours:
        peer.offer(NAME).address = address_of(server.sockets[0].getsockname()[1])
        with pytest.raises(TransportError, match="cannot prove"):
            await ours.read(peer, slices())
        await until(lambda: saw)
    assert len(saw) == NONCE_BYTES + PROOF_BYTES, "not a word of the pull"
    assert TOKEN.encode() not in saw


async def test_who_speaks_another_hello_is_not_reached() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        offer = peer.offer(NAME)
        assert ours.transport.reaches(peer)
        assert not offer.address.isdecimal(), "versions before this one connect to numbers alone"
        for other in (str(port_of(peer)), f"{port_of(peer)}/3"):
            offer.address = other
            assert not ours.transport.reaches(peer)
            with pytest.raises(TransportError, match="this version of the hello"):
                await ours.read(peer, slices())


async def test_a_length_that_no_frame_has_ends_the_connection() -> None:
    """Of a worker that is not in its senses."""
    end = SendingEnd()
    token = FleetToken(TOKEN)
    tasks = BackgroundTasks("test")

    async def hello(link: socket.socket) -> None:
        await prove_to_reader(link, NAME, end.incarnation, token)

    async def answer(link: socket.socket) -> None:
        with link:
            link.send(LENGTH.pack(MOST_FRAME_BYTES + 1))

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        accepting = HelloGate(server, hello, answer, 5.0, tasks).run()
        async with tasks.beside(accepting, "accept"), end.served() as peer:
            peer.offer(NAME).address = address_of(server.getsockname()[1])
            async with reading_end(NAME) as ours:
                with pytest.raises(TransportError, match="frame of"):
                    await ours.read(peer, slices())
                assert not idle(ours)
        await tasks.close()


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
