"""What only shared memory can do wrong: who may map a pool, and for how long it stays mapped."""

import asyncio
import contextlib
import fcntl
import gc
import os
import socket
from pathlib import Path

import pytest
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb

from kvtransfer.shared_memory import NAME, framed, this_place
from kvtransfer.transport import Peer, TransportError
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


def maps_of_pools() -> list[str]:
    """Lines of our address space that are pools, mapped for reading only."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "memfd:test-kv" in line and " r--s " in line]


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


def attach(token: str, incarnation: bytes) -> bytes:
    return framed(pb.PoolRequest(attach=pb.PoolAttach(fleet_token=token, incarnation=incarnation)))


async def test_a_pool_is_mapped_for_reading_and_only_once() -> None:
    async with SendingEnd().served() as peer, reading_end(NAME) as ours:
        fetches = (ours.fetch(peer, [kv_slice]) for kv_slice in slices())
        assert [await fetch for fetch in fetches] == [[None]] * len(slices())
        gc.collect()  # those of earlier tests may still wait for it
        assert len(maps_of_pools()) == 1


async def test_a_mapping_goes_with_the_sender_that_died_idle() -> None:
    """Otherwise the memory of each life would stay for as long as its readers live."""
    async with reading_end(NAME) as ours:
        async with end_process("send") as end:
            assert set(await ours.fetch(end.peer, slices())) == {None}
            assert maps_of_pools()
            end.process.kill()
            await end.process.wait()

        def unmapped() -> bool:
            gc.collect()
            return not maps_of_pools()

        await until(unmapped)


async def test_garbage_and_strangers_are_hung_up_on_and_nobody_else_is() -> None:
    end = SendingEnd()
    async with end.served() as peer, reading_end(NAME) as ours:
        assert await ours.fetch(peer, slices()[:1]) == [None]
        for first in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xff\xff\xff",
            b"\5\0\0\0\xff\xff\xff\xff\xff",
            attach("guess", end.incarnation),
            attach(TOKEN, b"another"),
            framed(pb.PoolRequest(serial=1, pull=pb.PullRequest())),
        ):
            with contextlib.closing(await knock(peer)) as link:
                await asyncio.get_running_loop().sock_sendall(link, first)
                with contextlib.suppress(ConnectionResetError):
                    assert await answer(link) == b""
        assert set(await ours.fetch(peer, slices())) == {None}


@pytest.mark.parametrize("what", ["twice", "attach again", "too many"])
async def test_a_reader_out_of_order_loses_its_loans(what: str) -> None:
    end = SendingEnd()
    async with end.served() as peer:
        with contextlib.closing(await knock(peer)) as link:
            request = pull_request(slices()[:1], end.incarnation)
            asks = {
                "twice": [pb.PoolRequest(serial=1, pull=request)] * 2,
                "attach again": [pb.PoolRequest(attach=pb.PoolAttach())],
                "too many": [pb.PoolRequest(serial=n, pull=request) for n in range(300)],
            }[what]
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(link, attach(TOKEN, end.incarnation))
            assert await answer(link) == b"\1"
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(link, b"".join(framed(ask) for ask in asks))
                while await answer(link):
                    pass
        await until(lambda: not (end.machine.lent or end.machine.reading))


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
