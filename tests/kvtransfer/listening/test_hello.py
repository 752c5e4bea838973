"""Two sides prove to each other that they have one token, and show nothing to who has not."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from baton.wire.fleet_token import FleetToken
from kvtransfer.hello import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    HelloError,
    check_same_user,
    prove_to_reader,
    prove_to_worker,
)

LIFE = b"a life of sixteen"
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    reader, worker = socket.socketpair()
    with reader, worker:
        for end in (reader, worker):
            end.setblocking(False)
        yield reader, worker


async def meet(
    ends: Ends,
    reader: FleetToken,
    worker: FleetToken,
    life: bytes = LIFE,
    transport: str = "tcp",
) -> list[str]:
    """What became of the reader's side, and of the worker's."""

    async def said(link: socket.socket, side: "asyncio.Future[None]") -> str:
        try:
            await side
        except OSError as error:
            link.close()
            return str(error)
        return ""

    async with asyncio.timeout(5):
        return await asyncio.gather(
            said(ends[0], prove_to_worker(ends[0], transport, life, reader)),
            said(ends[1], prove_to_reader(ends[1], "tcp", LIFE, worker)),
        )


@pytest.mark.parametrize(
    ("reader", "worker"),
    [
        (("one",), ("one",)),
        (("one",), ("two", "one")),  # the worker has read the file's new first line
        (("two", "one"), ("one", "two")),
        (("",), ("",)),  # a fleet without a token
    ],
)
async def test_who_has_one_token_meets(
    ends: Ends, reader: tuple[str, ...], worker: tuple[str, ...]
) -> None:
    assert await meet(ends, FleetToken(*reader), FleetToken(*worker)) == ["", ""]


@pytest.mark.parametrize(
    ("reader", "worker", "other"),
    [
        (("one",), ("two",), {}),
        (("",), ("two",), {}),
        (("one",), (), {}),
        (("",), (), {}),
        (("one",), ("one",), {"life": b"another life"}),
        (("one",), ("one",), {"transport": "shared_memory"}),
    ],
)
async def test_all_else_is_refused_by_both(
    ends: Ends, reader: tuple[str, ...], worker: tuple[str, ...], other: dict
) -> None:
    here, there = await meet(ends, FleetToken(*reader), FleetToken(*worker), **other)
    assert "closed its socket" in here
    assert "another token, or expects another incarnation" in there


async def exactly(link: socket.socket, size_bytes: int) -> bytes:
    found = b""
    while len(found) < size_bytes:
        found += await asyncio.get_running_loop().sock_recv(link, size_bytes - len(found))
    return found


async def test_a_proof_is_good_for_one_side_of_one_connection(ends: Ends) -> None:
    """What was heard on one is not taken on another, nor sent back where it came from."""
    token = FleetToken("one")
    reader, worker = ends
    serving = asyncio.ensure_future(prove_to_reader(worker, "tcp", LIFE, token))
    first, second = socket.socketpair()
    with first, second:
        for end in (first, second):
            end.setblocking(False)
        reading = asyncio.ensure_future(prove_to_worker(first, "tcp", LIFE, token))
        await exactly(reader, len(GREETING) + NONCE_BYTES)
        second.send(GREETING + os.urandom(NONCE_BYTES))
        said = await exactly(second, NONCE_BYTES + PROOF_BYTES)
        reader.send(said)  # replayed to a worker with another nonce
        second.send(said[NONCE_BYTES:])  # and sent back
        with pytest.raises(HelloError, match="another token"):
            await serving
        with pytest.raises(HelloError, match="cannot prove"):
            await reading


async def test_another_version_is_named(ends: Ends) -> None:
    reader, worker = ends
    worker.send(GREETING.replace(b"2", b"3") + bytes(NONCE_BYTES))
    with pytest.raises(HelloError, match=r"greets with b'baton-kv 003\\n'"):
        await prove_to_worker(reader, "tcp", LIFE, FleetToken("one"))
    with pytest.raises(BlockingIOError):
        worker.recv(1)  # the reader says nothing to it


def test_another_user_is_not_spoken_to(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_user(ends[0])
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(HelloError, match="belongs to user"):
        check_same_user(ends[0])
