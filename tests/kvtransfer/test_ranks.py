"""What a rank apart does of a hand-off, and what its leader makes of that."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from batonpb import prefill_pb2 as pb
from batonpb import rank_pb2
from batonpb.decode_pb2 import PrefillTarget, Submission

from baton.types.geometry import KvGeometry
from decode_worker.frame_puller import FramePuller
from decode_worker.pacing import ReceivePacer
from kvtransfer.chunk import PoolView
from kvtransfer.edge import Edge
from kvtransfer.kv_slice import KvSlice
from kvtransfer.ranks.link import RankGoneError
from kvtransfer.ranks.rank_side import RankHandoffs
from kvtransfer.receiver import Action, CloseStream, HandoffReceiver, Pull
from prefill_worker.handoff import Handoff

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, num_blocks=8, dtype="bf16")
WHOLE = KvSlice(0, 2, 0, 1, 0, 3, 40)
KEY = ("request", 1, 1, b"d")
WORDS = ("request_id", "attempt", "generation", "decode_incarnation")
PROMPT = {"prompt_tokens": 40, "pages": [3, 1, 2]}


def test_a_rank_gives_back_what_nobody_reads_and_may_send_nothing_of_it() -> None:
    back: list[str] = []
    pool = PoolView(bytearray(GEOMETRY.pool_bytes), GEOMETRY, first_head=2)
    held = RankHandoffs(pool, back.append)
    held.hold(rank_pb2.RankHold(name="p/1", **dict(zip(WORDS, KEY, strict=True)), **PROMPT))
    found = held.find(KEY)
    theirs = KvSlice(0, 2, 2, 1, 0, 3, 40)
    assert not found.machine.may_read(theirs), "it is not computed"
    published = rank_pb2.RankPublish(name="p/1", kv_slice=theirs.to_wire())
    held.publish(published)
    held.publish(published)  # a stream that came back repeats
    assert found.machine.may_read(theirs)
    assert not found.machine.may_read(WHOLE), "another rank's head"
    found.machine.read_begins()
    held.revoke("p/1")
    assert not found.machine.may_read(theirs) and back == []
    found.perform(found.machine.read_ended())
    assert back == ["p/1"] and held.find(KEY) is None
    held.publish(published)  # late, and of no use


async def test_decode_hears_of_a_rectangle_when_its_rank_knows() -> None:
    """What comes behind it waits too: the commit record counts it."""
    handoff = Handoff("p/1", pb.PrefillStart(), Mock())
    known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    said = [pb.PrefillEvent(published=pb.Published(block_begin=n)) for n in range(3)]
    handoff.send(said[0])
    handoff.send(said[1], known)
    handoff.send(said[2])
    assert [handoff.events.get_nowait()] == said[:1] and handoff.events.empty()
    known.set_result(None)
    await asyncio.sleep(0)
    assert [handoff.events.get_nowait() for _ in range(2)] == said[1:]


class Taker:
    """A rank apart that says what the test wants."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[rank_pb2.RankTake] = []

    async def take(self, word: rank_pb2.RankTake) -> rank_pb2.RankTaken:
        self.asked.append(word)
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return rank_pb2.RankTaken(outcomes=[answer], reason="late" * (answer == 0))


class Leader:
    """A receiving machine whose one head two ranks hold, both of them apart."""

    def __init__(self, *takers: Taker) -> None:
        self.machine = HandoffReceiver(GEOMETRY, 40)
        self.actions: list[Action] = []
        peers = Mock(edge=Mock(return_value=Edge()))
        peers.address = lambda target, kv_slice: "rank:1"
        pool: Any = SimpleNamespace(
            geometry=GEOMETRY, elsewhere=lambda _: takers, holding=lambda _: ()
        )
        parts: Any = SimpleNamespace(
            pool=pool,
            identity=Mock(incarnation=b"d"),
            peers=peers,
            metrics=Mock(),
            pacer=ReceivePacer(0.0),
        )
        submission = Submission(request_id="request", attempt=1)
        self.puller = FramePuller(submission, self.machine, parts, self.actions.extend)
        self.machine.reserved(1, 0, 0)
        self.machine.accepted(resumed=False, now_ns=0)
        self.machine.published(WHOLE, 0)
        self.actions += self.machine.bound(1, (3, 1, 2))

    async def pull(self) -> None:
        (pull,) = [self.actions.pop(n) for n, a in enumerate(self.actions) if isinstance(a, Pull)]
        await self.puller.pull(pull, PrefillTarget(address="leader:1"), 1)


async def test_a_frame_counts_when_each_rank_that_needs_it_has_it() -> None:
    ranks = Taker(rank_pb2.STORED, rank_pb2.STORED), Taker(rank_pb2.DAMAGED, rank_pb2.STORED)
    leader = Leader(*ranks)
    await leader.pull()
    assert leader.machine.writing == 0 and leader.machine.repairs == 1
    assert leader.machine.payload_bytes == 0
    await leader.pull()
    assert leader.machine.payload_bytes == WHOLE.payload_bytes(GEOMETRY)
    for rank in ranks:
        assert [word.address for word in rank.asked] == ["rank:1"] * 2
        assert list(rank.asked[0].pages) == [3, 1, 2]


async def test_what_a_rank_missed_is_pulled_again_when_the_peer_lives() -> None:
    leader = Leader(Taker(rank_pb2.MISSING, rank_pb2.STORED))
    await leader.pull()
    assert leader.machine.writing == 0 and not leader.actions
    leader.actions += leader.machine.peer_lives(1)
    await leader.pull()
    assert leader.machine.payload_bytes > 0


async def test_a_rank_that_never_says_what_it_wrote_leaves_its_pages_unproven() -> None:
    leader = Leader(Taker(RankGoneError("gone")), Taker(rank_pb2.STORED))
    with pytest.raises(RankGoneError):
        await leader.pull()
    assert leader.machine.writing == 1
    assert leader.machine.revoked(1) == [CloseStream(release=False)], "and no `Drained`"
