"""What only shared memory can do wrong: who may map a pool, and for how long it stays mapped."""

import asyncio
import contextlib
import fcntl
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar

import pytest
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from kvtransfer.hello import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    HelloGate,
    prove_to_reader,
    prove_to_worker,
)
from kvtransfer.shared_memory import (
    GRANTED,
    MOST_LOANS,
    NAME,
    read_message,
    this_place,
)
from kvtransfer.transport import Peer, TransportError, framed
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


def maps_of_pools() -> set[str]:
    """Lines of our address space that are pools, mapped for reading only."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if "memfd:test-kv" in line and " r--s " in line}


async def knock(peer: Peer) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.setblocking(False)
    offer = peer.offer(NAME)
    assert offer is not None
    await asyncio.get_running_loop().sock_connect(link, "\0" + offer.address)
    return link


async def answer(link: socket.socket) -> bytes:
    """What comes back; b"" when the sender hangs up."""
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(link, 1 << 16)


async def met(peer: Peer, token: str = TOKEN) -> socket.socket:
    """A connection behind its hello."""
    with contextlib.ExitStack() as undo:
        link = undo.enter_context(await knock(peer))
        async with asyncio.timeout(5):
            await prove_to_worker(link, NAME, peer.target.incarnation, FleetToken(token))
        undo.pop_all()
    return link


async def until_it_ends(link: socket.socket) -> bytes:
    """All that comes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while said := await answer(link):
            found += said
    return found


ATTACH = framed(pb.PoolRequest(attach=pb.PoolAttach()))


@contextlib.asynccontextmanager
async def lending(answer: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[Peer]:
    """A peer whose socket of lent memory is answered otherwise, by who knows the token."""
    tasks = BackgroundTasks("test")
    end = SendingEnd()
    name = f"baton-test/{end.incarnation.hex()}"

    async def hello(link: socket.socket) -> None:
        link.setblocking(False)
        await prove_to_reader(link, NAME, end.incarnation, FleetToken(TOKEN))

    async def serve(link: socket.socket) -> None:
        with link:
            socket.send_fds(link, [GRANTED], [end.pool_fd])
            await answer(link)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        async with end.served() as peer:
            peer.offer(NAME).address = name
            gate = HelloGate(listener, hello, serve, 5.0, tasks)
            async with tasks.beside(gate.run(), "accept"):
                yield peer
            await tasks.close()


async def test_a_pool_is_mapped_for_reading_and_only_once() -> None:
    earlier = maps_of_pools()  # of tests whose tracebacks still hold them
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        fetches = (ours.fetch(peer, [kv_slice]) for kv_slice in slices())
        assert [await fetch for fetch in fetches] == [[None]] * len(slices())
        assert len(maps_of_pools() - earlier) == 1


async def test_a_mapping_goes_with_the_sender_that_died_idle() -> None:
    """Otherwise the memory of each life would stay for as long as its readers live."""
    earlier = maps_of_pools()
    async with reading_end(NAME) as ours:
        async with end_process("send") as end:
            assert set(await ours.fetch(end.peer, slices())) == {None}
            assert maps_of_pools() - earlier
            end.process.kill()
            await end.process.wait()

        def unmapped() -> bool:
            gc.collect()
            return not maps_of_pools() - earlier

        await until(unmapped)


async def test_garbage_and_strangers_are_hung_up_on_and_nobody_else_is() -> None:
    end = SendingEnd()
    async with end.served() as peer, reading_end(NAME) as ours:
        assert await ours.fetch(peer, slices()[:1]) == [None]
        for first in (
            b"GET / HTTP/1.1\r\n\r\n" * 8,
            b"\xff\xff\xff\xff" * 32,
            bytes(NONCE_BYTES + PROOF_BYTES),
            framed(pb.PoolRequest(attach=pb.PoolAttach(fleet_token=TOKEN))) * 8,  # as it was once
        ):
            with contextlib.closing(await knock(peer)) as link:
                await asyncio.get_running_loop().sock_sendall(link, first)
                said = await until_it_ends(link)
                assert said[: len(GREETING)] == GREETING
                assert len(said) == len(GREETING) + NONCE_BYTES
        with pytest.raises(OSError, match="closed its socket"):
            await met(peer, "guess")
        for first in (
            b"\5\0\0\0\xff\xff\xff\xff\xff",
            b"\xff\xff\xff\xff",
            framed(pb.PoolRequest(serial=1, pull=pb.PullRequest()))[:-1],
        ):
            with contextlib.closing(await met(peer)) as link:
                await asyncio.get_running_loop().sock_sendall(link, first)
                link.shutdown(socket.SHUT_WR)
                assert await until_it_ends(link) == b""
        assert set(await ours.fetch(peer, slices())) == {None}


async def test_another_user_who_holds_the_name_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever may open sockets in this namespace can take a dead worker's name."""
    saw: list[bytes] = []

    async def squat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(NONCE_BYTES))
        try:
            saw.append(await reader.read())
        except OSError:  # our greeting was not even read
            saw.append(b"")
        writer.close()
        await writer.wait_closed()

    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        name = f"baton-test/{peer.target.incarnation.hex()}"
        async with await asyncio.start_unix_server(squat, "\0" + name):
            peer.offer(NAME).address = name
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # the kernel says whose it is
            with pytest.raises(TransportError, match=f"belongs to user {user}"):
                await ours.read(peer, slices())
            await until(lambda: saw)
    assert saw == [b""]


async def test_our_user_without_the_token_sees_neither_token_nor_capability() -> None:
    saw = bytearray()

    async def squat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(NONCE_BYTES))
        saw.extend(await reader.readexactly(NONCE_BYTES + PROOF_BYTES))
        writer.write(bytes(PROOF_BYTES))
        saw.extend(await reader.read())
        writer.close()
        await writer.wait_closed()

    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        name = f"baton-test/{peer.target.incarnation.hex()}"
        async with await asyncio.start_unix_server(squat, "\0" + name):
            peer.offer(NAME).address = name
            with pytest.raises(TransportError, match="cannot prove"):
                await ours.read(peer, slices())
            await until(lambda: saw)
    assert len(saw) == NONCE_BYTES + PROOF_BYTES, "not a word of the pull"
    assert TOKEN.encode() not in saw


async def test_a_reader_of_another_user_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SendingEnd().served() as peer:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with contextlib.closing(await knock(peer)) as link:
            assert await until_it_ends(link) == b""


async def test_who_speaks_another_hello_is_not_reached() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        assert ours.transport.reaches(peer)
        kernel, namespace, _ = this_place().split("/")
        peer.offer(NAME).place = f"{kernel}/{namespace}"  # as versions before this one say it
        assert not ours.transport.reaches(peer)


@pytest.mark.parametrize("what", ["twice", "attach again"])
async def test_a_reader_out_of_order_loses_its_loans(what: str) -> None:
    end = SendingEnd()
    async with end.served() as peer:
        with contextlib.closing(await met(peer)) as link:
            request = pull_request(slices()[:1], end.incarnation)
            asks = {
                "twice": [pb.PoolRequest(serial=1, pull=request)] * 2,
                "attach again": [pb.PoolRequest(attach=pb.PoolAttach())],
            }[what]
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(link, ATTACH)
            assert await answer(link) == GRANTED
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(link, b"".join(framed(ask) for ask in asks))
                while await answer(link):
                    pass
        await until(lambda: not (end.machine.lent or end.machine.reading))


async def attached(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    link = await met(peer)
    await asyncio.get_running_loop().sock_sendall(link, ATTACH)
    assert await answer(link) == GRANTED
    return await asyncio.open_connection(sock=link)


async def test_only_the_loan_that_is_too_many_is_refused() -> None:
    end = SendingEnd()
    async with end.served() as peer:
        reader, writer = await attached(peer)
        request = pull_request(slices()[:1], end.incarnation)
        loans: dict[int, pb.PoolLoan] = {}

        async def ask(*serials: int) -> None:
            for serial in serials:
                writer.write(framed(pb.PoolRequest(serial=serial, pull=request)))
            async with asyncio.timeout(10):
                for _ in serials:
                    loan = pb.PoolLoan.FromString(await read_message(reader))
                    loans[loan.serial] = loan

        await ask(*range(MOST_LOANS))
        assert all(loan.chunks[0].pages for loan in loans.values())
        await ask(1000, 1001)
        assert not loans[1000].chunks
        assert not loans[1001].chunks
        assert end.machine.lent == MOST_LOANS, "those before stand"
        writer.write(framed(pb.PoolRequest(serial=7, let_go=pb.Release())))
        await ask(1002)
        assert loans[1002].chunks[0].pages
        writer.close()
        await writer.wait_closed()
        await until(lambda: not end.machine.lent)


async def test_more_pulls_at_once_than_there_are_loans_all_end_well() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        assert await ours.fetch(peer, slices()[:1]) == [None]

        async def pull() -> int:
            request = pull_request(slices()[:1], peer.target.incarnation)
            frames = ours.transport.pull(peer, request)
            try:
                return len(await frames.read())
            finally:
                frames.close()

        async with asyncio.timeout(30):
            assert await asyncio.gather(*(pull() for _ in range(MOST_LOANS + 50))) == [1] * (
                MOST_LOANS + 50
            )


async def test_a_reader_that_does_not_read_is_not_listened_to() -> None:
    """What it asks for waits in its own memory, not in the sender's."""
    end = SendingEnd()
    lent = 0

    class Loan:
        chunks: ClassVar = [pb.ChunkHeader(digests=bytes(20_000))]

        def end(self) -> None: ...

    class Source:
        def may_attach(self, _: pb.PullRequest) -> bool:
            return True

        async def lend(self, _: pb.PullRequest) -> Loan:
            nonlocal lent
            lent += 1
            return Loan()

    end.source = Source()
    async with end.served() as peer:
        reader, writer = await attached(peer)

        def ask(serials: range) -> None:
            for serial in serials:
                writer.write(framed(pb.PoolRequest(serial=serial, pull=pb.PullRequest())))

        ask(range(200))  # 4 MB of answers
        await until(lambda: lent == 200)
        for serial in range(200):
            writer.write(framed(pb.PoolRequest(serial=serial, let_go=pb.Release())))
        ask(range(200, 400))
        await asyncio.sleep(0.3)
        assert lent == 200
        async with asyncio.timeout(10):
            for _ in range(400):
                await read_message(reader)
        assert lent == 400
        writer.close()
        await writer.wait_closed()


async def test_a_sender_that_does_not_listen_is_not_written_to_for_ever() -> None:
    async def mute(link: socket.socket) -> None:
        await asyncio.Event().wait()

    async with lending(mute) as peer, reading_end(NAME) as ours:
        request = pull_request(slices()[:1], peer.target.incarnation)
        request.capability = bytes(100_000)
        pulls = [ours.transport.pull(peer, request) for _ in range(200)]
        reading = [asyncio.ensure_future(pull.read()) for pull in pulls]
        line = await ours.transport.line_to(peer, request)
        await asyncio.sleep(0.3)
        assert line._writer.transport.get_write_buffer_size() < 1 << 20, "of 20 MB"
        for read in reading:
            read.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for pull in pulls:
            pull.close()
        assert line._turns._value == MOST_LOANS


async def test_a_pool_that_could_shrink_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read behind the end of a file kills the reader."""
    end = SendingEnd()
    sealed = end.pool_fd
    end.pool_fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.close(sealed)
    os.ftruncate(end.pool_fd, 1 << 20)
    assert not fcntl.fcntl(end.pool_fd, fcntl.F_GET_SEALS)
    async with end.served() as peer, reading_end(NAME) as ours:
        with pytest.raises(TransportError, match="shrink"):
            await ours.fetch(peer, slices())


async def test_only_peers_in_the_same_place_are_reached() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        assert peer.offer(NAME).place == this_place()
        elsewhere = common_pb2.Capabilities()
        elsewhere.CopyFrom(peer.capabilities)
        elsewhere.transports[0].place = "another kernel/1"
        assert not ours.transport.reaches(Peer(peer.target, elsewhere))
        assert not ours.transport.reaches(Peer(peer.target, common_pb2.Capabilities()))


async def test_pulls_that_run_while_the_sender_closes_are_told() -> None:
    ours = ReadingEnd(NAME)
    async with SendingEnd().served() as peer:
        frames = await ours.read(peer, slices())
        assert len(frames) == len(slices())
    for frame, kv_slice in zip(frames, slices(), strict=True):
        ours.store(peer, frame, kv_slice)
    ours.pull.close()
    with pytest.raises(TransportError):
        await ours.read(peer, slices())
    await ours.close()
