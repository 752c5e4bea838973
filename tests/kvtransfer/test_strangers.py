"""Garbage on every port of the data plane: memory stays bounded, and the right ones are served."""

import asyncio
import contextlib
import random
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from batonpb import prefill_pb2 as pb

from baton.engine.ipc import LENGTH
from kvtransfer import shared_memory, tcp
from kvtransfer.hello import NONCE_BYTES, PROOF_BYTES
from kvtransfer.transport import framed
from tests.kvtransfer.edge_ends import SendingEnd, pull_request, reading_end, slices
from tests.soak import examples

MOST_BYTES = 16 << 20  # of memory, whatever a hundred strangers say
AT_ONCE = 25
Knock = Callable[[], Awaitable[socket.socket]]
Serves = Callable[[], Awaitable[None]]
Port = tuple[Knock, Serves, bytes]


async def connected(family: socket.AddressFamily, address: object) -> socket.socket:
    with contextlib.ExitStack() as undo:
        link = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        link.setblocking(False)
        await asyncio.get_running_loop().sock_connect(link, address)
        undo.pop_all()
    return link


@contextlib.asynccontextmanager
async def kv_port(name: str) -> AsyncIterator[Port]:
    async with SendingEnd().served() as peer:

        async def knock() -> socket.socket:
            offer = peer.offer(name)
            if name == tcp.NAME:
                return await connected(socket.AF_INET, ("127.0.0.1", tcp.port_in(offer.address)))
            return await connected(socket.AF_UNIX, "\0" + offer.address)

        async def serves() -> None:
            async with reading_end(name) as ours:
                assert set(await ours.fetch(peer, slices())) == {None}

        right = framed(pb.PoolRequest(pull=pull_request(slices(), peer.target.incarnation)))
        yield knock, serves, bytes(NONCE_BYTES + PROOF_BYTES) + right


def garbage(chance: random.Random, right: bytes) -> bytes:
    """Noise, lengths without bodies, and what is right but for its end or a byte."""
    noise = chance.randbytes(chance.choice([0, 1, 3, 4, 63, 64, 65, 100, 5000, 100_000]))
    length = chance.choice([0, 1, 64, 4096, 4097, 4 << 20, 64 << 20, 0x7FFFFFFF, 0xFFFFFFFF])
    broken = bytearray(right)
    broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
    return chance.choice(
        [
            noise,
            LENGTH.pack(length),
            LENGTH.pack(length) + noise,
            right[: chance.randrange(len(right))],
            bytes(broken),
            right * chance.randrange(2, 9),
        ]
    )


async def say(knock: Knock, chance: random.Random, right: bytes) -> None:
    """One stranger: some wait for an end, some hang up, some say no more."""
    with await knock() as link, contextlib.suppress(OSError):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(link, garbage(chance, right))
        manner = chance.choice(["hang up", "no more", "stay"])
        if manner == "no more":
            link.shutdown(socket.SHUT_WR)
        if manner != "hang up":
            async with asyncio.timeout(0.05):
                while await loop.sock_recv(link, 4096):
                    pass


@pytest.mark.parametrize("name", [tcp.NAME, shared_memory.NAME])
async def test_garbage_costs_little_and_keeps_nobody_out(name: str) -> None:
    chance = random.Random(name)
    async with kv_port(name) as (knock, serves, right):
        tracemalloc.start()
        try:
            for _ in range(examples(8)):
                strangers = (say(knock, chance, right) for _ in range(AT_ONCE))
                await asyncio.gather(*strangers)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most_bytes < MOST_BYTES
        await serves()
