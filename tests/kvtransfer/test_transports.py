"""One suite for every transport: order, damage, cancel, deadline, and ends that die or stand still.

Real sockets; whoever is killed or stopped is a process. What only one transport can do wrong is in
a file of its own (``test_shared_memory.py``).
"""

import asyncio
import os
import signal

import pytest

from kvtransfer import sender
from kvtransfer.chunk import ChunkError, GoneError
from kvtransfer.edge import FALLBACK
from kvtransfer.transport import TransportError
from kvtransfer.transports import TRANSPORTS
from tests.kvtransfer.damaged_frames import KINDS
from tests.kvtransfer.edge_ends import (
    BLOCKS,
    LEASE_NS,
    OURS,
    SendingEnd,
    end_process,
    pull_request,
    reading_end,
    slices,
    told,
)

LEASE_LAPSED_NS = LEASE_NS + 1
SOON_S = 10.0  # for what takes milliseconds on a machine that is not busy


# Each edge of a pair has two helper processes, which import torch.
WAYS = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "pair" else []) for name in TRANSPORTS
]


@pytest.fixture(params=WAYS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


async def until(condition, timeout_s: float = SOON_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_is_stored_is_what_was_asked_for_in_that_order(name: str) -> None:
    end = SendingEnd()
    asked = slices()[::-1]
    assert len(asked) > 3
    async with end.served() as peer, reading_end(name) as ours:
        assert ours.transport.reaches(peer)
        assert await ours.fetch(peer, asked[:2]) == [None, None]
        untouched = [s for s in asked[2:] if any(ours.view.read(OURS, s))]
        assert untouched == [], "only what was asked for is written"
        assert await ours.fetch(peer, asked[2:]) == [None] * len(asked[2:])
        for kv_slice in asked:
            assert ours.view.read(OURS, kv_slice) == end.view.read(BLOCKS, kv_slice)
        await until(lambda: not (end.machine.lent or end.machine.reading))


@pytest.mark.parametrize("damage", KINDS)
async def test_damage_is_refused_and_the_next_try_is_good(name: str, damage: str) -> None:
    end = SendingEnd(f"{damage}:2")
    async with end.served() as peer, reading_end(name) as ours:
        missing, tries = slices(), 0
        while missing:
            faults = await ours.fetch(peer, missing)
            refused = [fault for fault in faults if fault is not None]
            assert all(isinstance(fault, ChunkError) for fault in refused)
            assert refused or tries
            missing = [s for s, fault in zip(missing, faults, strict=True) if fault is not None]
            assert not any(any(ours.view.read(OURS, s)) for s in missing), "no trace of it is left"
            missing.reverse()  # so that another one is hit
            tries += 1
            assert tries < 10
        for kv_slice in slices():
            assert ours.view.read(OURS, kv_slice) == end.view.read(BLOCKS, kv_slice)


async def test_what_is_not_held_is_gone(name: str) -> None:
    end = SendingEnd()
    async with end.served() as peer, reading_end(name) as ours:
        one = slices()[:1]
        for request in (
            pull_request(one, end.incarnation, generation=8),
            pull_request(one, b"another life of."),
        ):
            pull = ours.transport.pull(peer, request)
            (frame,) = await pull.read()
            with pytest.raises(GoneError):
                ours.store(peer, frame, one[0])
            pull.close()
        end.perform(end.machine.cancel())
        (fault,) = await ours.fetch(peer, one)
        assert isinstance(fault, GoneError)
        assert end.given_back == [sender.GiveBack(cancel=True)]


async def test_pages_that_went_to_others_are_never_taken_for_ours(name: str) -> None:
    """The hand-off ends, and its pages are reused, between the answer and its being stored."""
    end = SendingEnd()
    async with end.served() as peer, reading_end(name) as ours:
        asked = slices()
        right = [end.view.read(BLOCKS, kv_slice) for kv_slice in asked]
        frames = await ours.read(peer, asked)
        end.perform(end.machine.cancel())
        for now_ns in (1, 1 + sender.DRAIN_NS):
            end.perform(end.machine.tick(now_ns))
        assert len(end.given_back) == 1
        end.scribble(2)
        for frame, kv_slice, want in zip(frames, asked, right, strict=True):
            try:
                ours.store(peer, frame, kv_slice)
            except ChunkError:
                assert not any(ours.view.read(OURS, kv_slice))
            else:
                assert ours.view.read(OURS, kv_slice) == want
        ours.pull.close()
        await until(lambda: not end.machine.lent)
        assert len(end.given_back) == 1, "given back once"


async def test_a_pull_that_is_called_off_holds_nothing(name: str) -> None:
    end = SendingEnd()
    async with end.served() as peer, reading_end(name) as ours:
        assert await ours.fetch(peer, slices()[:1]) == [None]
        early = ours.transport.pull(peer, pull_request(slices(), end.incarnation))
        early.close()
        late = ours.transport.pull(peer, pull_request(slices(), end.incarnation))
        reading = asyncio.create_task(late.read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        late.close()
        late.close()
        end.perform(end.machine.cancel())
        await until(lambda: end.given_back)
        assert end.given_back[0].overdue == 0


async def test_a_sender_that_breaks_ends_the_pull(name: str, monkeypatch) -> None:
    end = SendingEnd()

    def broken(*_: object) -> None:
        raise IndexError("by design")

    async with end.served() as peer, reading_end(name) as ours:
        for method in ("_copy", "_digests"):
            monkeypatch.setattr(end.source, method, broken)
        with pytest.raises(TransportError):
            await ours.read(peer, slices())
        monkeypatch.undo()
        assert await ours.fetch(peer, slices()[:1]) == [None], "and no other"
        await until(lambda: not (end.machine.lent or end.machine.reading))


async def test_who_does_not_know_the_token_reads_nothing(name: str) -> None:
    async with SendingEnd().served() as peer, reading_end(name, token="guess") as ours:
        with pytest.raises(TransportError):
            await ours.read(peer, slices())


async def test_a_sender_that_stands_still_can_be_left_and_come_back_to(name: str) -> None:
    async with end_process("send") as end, reading_end(name) as ours:
        assert await ours.fetch(end.peer, slices()[:1]) == [None]
        os.kill(end.process.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ours.read(end.peer, slices())
        os.kill(end.process.pid, signal.SIGCONT)
        async with asyncio.timeout(SOON_S):
            assert set(await ours.fetch(end.peer, slices())) == {None}


async def test_a_sender_that_is_killed_ends_the_pull(name: str) -> None:
    async with end_process("send") as end, reading_end(name) as ours:
        frames = await ours.read(end.peer, slices())
        end.process.kill()
        await end.process.wait()
        for frame, kv_slice in zip(frames, slices(), strict=True):
            ours.store(end.peer, frame, kv_slice)  # what was given stays good
        ours.pull.close()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(TransportError):
                await ours.read(end.peer, slices())


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_reader_that_never_lets_go_costs_the_sender_a_moment(name: str, fate: int) -> None:
    """Dead: the kernel says so. Frozen, or broken: it is left behind, and reads on in vain."""
    end = SendingEnd()
    async with end.served() as peer:
        async with end_process("read", transport=name, **told(peer)) as reader:
            assert reader.answer["frames"] == len(slices())
            os.kill(reader.process.pid, fate)
            end.perform(end.machine.tick(LEASE_LAPSED_NS))
            assert end.machine.state is not sender.SenderState.OPEN
            if fate == signal.SIGKILL:
                await until(lambda: end.given_back)
                assert end.given_back == [sender.GiveBack(cancel=True)]
            else:
                end.perform(end.machine.tick(LEASE_LAPSED_NS + sender.DRAIN_NS))
                assert len(end.given_back) == 1
        async with reading_end(name) as other:  # the edge, and others, go on
            (fault,) = await other.fetch(peer, slices()[:1])
            assert isinstance(fault, GoneError)
        await until(lambda: not end.machine.lent)


def test_the_last_resort_is_the_last() -> None:
    assert list(TRANSPORTS)[-1] == FALLBACK
