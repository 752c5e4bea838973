"""Blocks leave the pool for tiers and come back: the tokens are the same, and nothing is left over.

The emulated engine's tokens depend on every byte of its KV, and the bytes are really copied: by
the test, when it likes, in the order that it likes, and not always with success.
"""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.tiers.places import TierPlaces
from baton.engine.core.tiers.tiers import BRING_NS, POOL, REST_NS, Copied
from baton.engine.emulated import EmulatedRunner
from baton.engine.process.tier_copier import BlockMover, Erasure
from baton.engine.process.tier_shelves import DiskShelf, MemoryShelf
from baton.types import events as ev
from baton.types.block_hashes import block_hashes, tag_in
from baton.types.errors import UnavailableError
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from tests.soak import examples

SEED = b"s" * 16
GONE = b"g" * 16  # seed of a tenant that is deleted
BLOCK_NS = 1000


class Engine:
    """A core with tiers in memory, and the copies that it has ordered.

    With a ``folder`` the last tier is on disk, and shared with those beside the folder.
    """

    def __init__(
        self, blocks: int, *places: int, dtype: str = "bf16", folder: Path | None = None
    ) -> None:
        geometry = KvGeometry(
            num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=blocks, dtype=dtype
        )
        buffer = bytearray(geometry.pool_bytes)
        names = ("memory", "disk")[: len(places)]
        tiers = [TierPlaces(*tier) for tier in zip(names, places, strict=True)]
        size = geometry.block_bytes
        shelves: dict = {tier.name: MemoryShelf(tier.places, size) for tier in tiers}
        if folder is not None:
            disk = DiskShelf(folder, "0" * 32, places[-1], size, shared=True)
            shelves[tiers[-1].name] = disk
            self.others = disk.others
        runner = EmulatedRunner(geometry, buffer)
        config = SchedulerConfig(8, 64)
        self.core = EngineCore(runner, config, tiers=tiers, check_every_step=True)
        self.mover = BlockMover(buffer, geometry, shelves)
        self.shelves = shelves
        self.pending: list = []
        self.events: list[ev.Event] = []
        self.held: dict[str, set[bytes]] = {tier.name: set() for tier in tiers}
        self.now_ns = 0

    def submit(self, name, prompt, kind=Kind.FULL, ticket=0, seed=SEED, **params) -> None:
        spec = RequestSpec(
            kind=kind,
            params=SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **params}),
            hash_seed=seed,
            ticket=ticket,
        )
        request = EngineRequest(request_id=name, prompt=list(prompt), spec=spec)
        self.core.scheduler.submit(request, self.now_ns)

    def step(self) -> bool:
        self.now_ns += 1
        plan = self.core.plan(self.now_ns)
        self.core.batch.check_integrity()
        if plan.rows:
            self._note(self.core.apply(plan, self.core.runner.execute(plan), self.now_ns, 1))
        else:
            self._note(self.core.take_events())
        self.pending += self.core.take_copies(self.now_ns)
        self.core.batch.check_integrity()
        return bool(plan.rows)

    def _note(self, events) -> None:
        self.events += events
        for event in events:
            for change in event.tiers if isinstance(event, ev.CacheChanged) else ():
                self.held[change.tier] -= set(change.removed)
                self.held[change.tier] |= set(change.stored)

    def end_copy(self, index: int = 0, outcome: str = "") -> None:
        copy = self.pending.pop(index)
        if isinstance(copy, Erasure):
            self.mover.erase(copy.tags)
            return
        done = outcome or self.mover.move(copy)
        self.core.tiers.copied(Copied(copy.number, done, BLOCK_NS), self.now_ns)
        self.core.batch.check_integrity()

    def look(self) -> None:
        """Learn what the other engines have stored and removed."""
        self.core.tiers.note_elsewhere(*self.others.look())
        self.core.batch.check_integrity()

    def forget(self) -> int:
        """Forget what has the seed ``GONE``; return the number of its blocks in the pool."""
        tags = frozenset([tag_in(GONE)])
        blocks, number = self.core.forget(tags)
        self.pending += [*self.core.take_copies(self.now_ns), Erasure(number, tags)]
        self.core.batch.check_integrity()
        return blocks

    def names(self) -> set[bytes]:
        """The names in the pool, in the tiers, and on their shelves."""
        places = [name for tier in self.core.tiers._order for name in tier._held]
        shelves = [name for shelf in self.shelves.values() for name in shelf._names if name]
        return {*self.core.pool.hashes(), *places, *shelves}

    def run(self, outcome: str = "") -> None:
        """Until nothing is left to do."""
        for _ in range(5000):
            stepped = self.step()
            while self.pending:
                stepped = True
                self.end_copy(0, outcome)
            if not stepped and not self.core.batch.has_work():
                return
        raise AssertionError("the engine did not become idle")

    def answer(self, name: str) -> list[int]:
        return [
            token.token
            for event in self.events
            if isinstance(event, ev.Tokens) and event.request_id == name
            for token in event.tokens
        ]

    def end(self, name: str) -> ev.Ended:
        (end,) = [e for e in self.events if isinstance(e, ev.Ended) and e.request_id == name]
        return end

    def counts(self, tier: str = "memory"):
        return {one.name: one for one in self.core.tiers.counts()}[tier]

    def baseline(self) -> None:
        counts = self.core.pool.counts()
        assert counts.in_use == counts.quarantined == 0, counts
        assert not self.core.pool.guarded and not self.core.tiers._running


def golden(prompt) -> list[int]:
    engine = Engine(256)
    engine.submit("golden", prompt)
    engine.run()
    return engine.answer("golden")


def prompt_of(number: int, blocks: int = 6) -> list[int]:
    return [(number * 37 + i * 7) % 251 for i in range(blocks * 16 + 5)]


def fill(engine: Engine, count: int = 6) -> None:
    """So many prompts, one after the other: more than the pool holds."""
    for number in range(count):
        engine.submit(f"fill-{number}", prompt_of(number))
        engine.run()


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "int8"])
def test_what_was_evicted_comes_back_and_the_tokens_are_those_computed(dtype):
    engine = Engine(20, 64, dtype=dtype)
    fill(engine)
    assert engine.counts().lost == 0
    first = engine.answer("fill-0")
    engine.submit("again", prompt_of(0))
    engine.run()
    assert engine.answer("again") == first
    end = engine.end("again")
    assert end.tier_tokens == {"memory": 6 * 16}
    assert (end.cached_tokens, end.computed_tokens) == (96, 5)
    engine.baseline()


def test_disk_takes_what_memory_gives_up():
    engine = Engine(24, 16, 96)
    fill(engine, 10)
    assert engine.counts("memory").lost == engine.counts("disk").lost == 0
    engine.submit("again", prompt_of(0))
    engine.run()
    assert engine.end("again").tier_tokens == {"disk": 96}
    assert engine.answer("again") == golden(prompt_of(0))
    engine.baseline()


def test_a_damaged_block_is_computed_again_and_forgotten():
    engine = Engine(20, 64)
    fill(engine)
    shelf = engine.shelves["memory"]
    shelf._blocks[:] ^= 1
    engine.submit("again", prompt_of(0))
    engine.run()
    assert engine.answer("again") == golden(prompt_of(0))
    assert engine.end("again").tier_tokens == {}
    assert engine.counts().damaged == 6
    engine.baseline()


def test_a_tier_that_takes_nothing_costs_nothing_and_rests():
    engine = Engine(20, 64)
    for number in range(6):
        engine.submit(f"fill-{number}", prompt_of(number))
        engine.run(outcome="failed")
    failed = engine.counts().failed
    assert 0 < failed <= 16 and engine.counts().held == 0
    assert engine.counts().lost > 0
    engine.now_ns += REST_NS
    engine.submit("more", prompt_of(9))
    engine.run()
    assert engine.counts().held > 0, "it is tried again"


def test_a_slow_copier_loses_blocks_and_delays_nobody():
    engine = Engine(20, 64)
    for number in range(6):
        engine.submit(f"fill-{number}", prompt_of(number))
        for _ in range(200):
            if not engine.step():
                break
    assert all(engine.end(f"fill-{n}").error_code == "" for n in range(6))
    assert len(engine.pending) <= 16 and engine.counts().lost > 0


def test_computing_is_chosen_where_it_is_faster():
    engine = Engine(20, 64)
    fill(engine)
    engine.submit("again", prompt_of(0))
    engine.run()  # measures: a block takes BLOCK_NS to come back
    fill(engine)
    engine.core._token_ns.add(1e-9)
    for _ in range(64):
        engine.core._token_ns.add(BLOCK_NS / 64)
    brought = engine.counts().brought
    engine.submit("quick", prompt_of(0))
    engine.run()
    assert engine.counts().brought == brought
    assert engine.answer("quick") == engine.answer("again")


def test_a_cancelled_prompt_leaves_its_blocks_to_others():
    engine = Engine(20, 64)
    fill(engine)
    engine.submit("again", prompt_of(0))
    engine.step()
    assert any(copy.target == "pool" for copy in engine.pending)
    engine.core.scheduler.cancel("again")
    engine.run()
    engine.baseline()
    brought = engine.counts().brought
    engine.submit("other", prompt_of(0))
    engine.run()
    assert engine.counts().brought == brought, "they are in the pool now"
    assert engine.end("other").cached_tokens == 96


def test_held_blocks_are_brought_back_for_a_peer():
    engine = Engine(20, 64)
    fill(engine)
    engine.submit("peer", prompt_of(0)[:96], kind=Kind.HELD)
    assert "peer" in engine.core.batch.queue.fetching
    engine.run()
    done = [event for event in engine.events if isinstance(event, ev.PromptDone)]
    assert [(event.request_id, event.cached_tokens) for event in done][-1] == ("peer", 96)
    engine.core.scheduler.release("peer")
    engine.run()
    engine.baseline()


def test_a_peer_whose_blocks_are_damaged_is_refused():
    engine = Engine(20, 64)
    fill(engine)
    engine.submit("peer", prompt_of(0)[:96], kind=Kind.HELD)
    engine.run(outcome="damaged")
    assert engine.end("peer").error_code == "unavailable"
    engine.baseline()


def test_a_reservation_pins_what_came_back():
    engine = Engine(20, 64)
    fill(engine)
    engine.submit("remote", prompt_of(0), kind=Kind.REMOTE)
    engine.run()
    (reserved,) = [event for event in engine.events if isinstance(event, ev.Reserved)]
    assert reserved.skip_blocks == 6
    engine.core.scheduler.cancel("remote")
    engine.run()
    engine.baseline()


def test_a_tier_that_hangs_stops_nobody_else_and_those_who_asked_it_for_no_longer_than_computing():
    """One copy that never ended stopped the admission of the whole worker."""
    engine = Engine(32, 64)
    fill(engine, 10)
    first = engine.answer("fill-0")
    engine.submit("again", prompt_of(0), ticket=100)
    for number in range(3):
        engine.submit(f"other-{number}", [number] * 20, ticket=101 + number)
    for _ in range(60):
        engine.step()
    ended = {event.request_id for event in engine.events if isinstance(event, ev.Ended)}
    assert {"other-0", "other-1", "other-2"} <= ended and "again" not in ended
    engine.now_ns += BRING_NS
    for _ in range(60):
        engine.step()
    assert engine.answer("again") == first
    assert engine.counts().late == 1

    hung = [copy for copy in engine.pending if copy.target == POOL]
    engine.submit("next", prompt_of(1), ticket=200)
    for _ in range(60):
        engine.step()
    assert engine.answer("next") == engine.answer("fill-1"), "nothing more is asked of it"
    assert [copy for copy in engine.pending if copy.target == POOL] == hung
    engine.run()
    engine.baseline()


def test_a_prompt_uses_what_came_in_time_and_computes_the_rest():
    engine = Engine(32, 64)
    fill(engine, 10)
    engine.submit("again", prompt_of(0), ticket=100)
    engine.step()
    for _ in range(2):
        engine.end_copy(next(n for n, copy in enumerate(engine.pending) if copy.target == POOL))
    engine.now_ns += BRING_NS
    for _ in range(60):
        engine.step()
    assert engine.answer("again") == engine.answer("fill-0")
    assert (engine.end("again").cached_tokens, engine.end("again").computed_tokens) == (32, 69)
    engine.run()
    engine.baseline()


def test_the_index_is_told_what_can_be_had_from_each_tier():
    engine = Engine(20, 8, 64)
    fill(engine, 8)
    memory, disk = (set(tier._held) for tier in engine.core.tiers._order)
    pool = set(engine.core.pool.hashes())
    assert engine.held == {"memory": pool | memory, "disk": pool | memory | disk}
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(engine.events[-1]), type=ev.StepDone).tiers
        == engine.core.tiers.counts()
    )


def test_a_prefix_that_a_peer_sends_lacks_only_what_no_tier_has_here():
    engine = Engine(24, 64)
    fill(engine)
    spec = RequestSpec(
        kind=Kind.REMOTE, params=SamplingParams(max_tokens=2), hash_seed=SEED, emitted=(None,)
    )
    prompt = [*prompt_of(0)[:96], *range(32)]  # 6 blocks lie in the tier, 2 nowhere
    engine.core.scheduler.submit(EngineRequest(request_id="p", prompt=prompt, spec=spec), 0)
    assert engine.core.batch.queue.overtaking
    engine.run()
    (reserved,) = [event for event in engine.events if isinstance(event, ev.Reserved)]
    assert reserved.skip_blocks == 6
    engine.core.scheduler.cancel("p")
    engine.run()
    engine.baseline()


def test_a_deleted_tenants_blocks_are_forgotten_in_every_place_and_others_stay():
    engine = Engine(16, 12, 24)
    for number in range(4):
        engine.submit(f"gone-{number}", prompt_of(number), seed=GONE)
        engine.submit(f"kept-{number}", prompt_of(number))
        engine.run()
    kept = {name for name in engine.names() if tag_in(name) == tag_in(SEED)}
    assert len(engine.names()) > len(kept) > 12
    engine.submit("running", prompt_of(9), seed=GONE)
    engine.step()
    assert engine.forget() > 0
    engine.run()
    assert not any(tag_in(name) == tag_in(GONE) for held in engine.held.values() for name in held)
    assert {name for name in engine.names() if tag_in(name) == tag_in(GONE)} == set()
    assert engine.answer("running") == golden(prompt_of(9))
    engine.submit("late", prompt_of(0), seed=GONE)  # of a router that does not know it yet
    engine.run()
    assert engine.answer("late") == golden(prompt_of(0))
    assert not any(tag_in(name) == tag_in(GONE) for name in engine.names())
    engine.submit("again", prompt_of(3))
    engine.run()
    assert engine.answer("again") == golden(prompt_of(3))
    engine.baseline()


ALL_NAMES = [
    name for number in range(5) for name in block_hashes(SEED, prompt_of(number, 7)[: 7 * 16])
]


class AnySchedule(RuleBasedStateMachine):
    """Prompts come, are cancelled, and copies end in any order and any way."""

    @initialize(blocks=st.integers(12, 24), memory=st.integers(1, 24), disk=st.integers(0, 32))
    def begin(self, blocks, memory, disk):
        places = (memory, disk) if disk else (memory,)
        self.engine = Engine(blocks, *places)
        self.names: dict[str, list[int]] = {}
        self.cancelled: set[str] = set()
        self.forgotten = False
        self.seen = set(ALL_NAMES)

    @rule(
        number=st.integers(0, 4),
        blocks=st.integers(1, 7),
        kind=st.sampled_from([*Kind]),
        seed=st.sampled_from([SEED, GONE]),
    )
    def submit(self, number, blocks, kind, seed):
        name = f"r{len(self.names)}"
        prompt = prompt_of(number, blocks)
        if kind is Kind.HELD:
            prompt = prompt[: blocks * 16]
        try:
            self.engine.submit(name, prompt, kind, len(self.names), seed, max_tokens=3)
        except UnavailableError:  # refused: nothing of it may remain
            assert kind is Kind.HELD
            return
        self.names[name] = prompt if kind is Kind.FULL else []

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(
        seed=st.integers(0, 999),
        outcome=st.sampled_from(["", "", "", "damaged", "gone", "failed"]),
    )
    def end_copy(self, seed, outcome):
        if self.engine.pending:
            index = random.Random(seed).randrange(len(self.engine.pending))
            if isinstance(self.engine.pending[index], Erasure):
                index = 0  # it follows the copies before it
                outcome = ""
            if isinstance(self.engine.pending[index], Erasure):
                self.engine.end_copy(index)
                return
            if outcome == "failed" and self.engine.pending[index].target == "pool":
                outcome = "damaged"
            self.engine.end_copy(index, outcome)

    @rule(seed=st.integers(0, 999))
    def cancel(self, seed):
        if self.names:
            name = random.Random(seed).choice(sorted(self.names))
            self.cancelled.add(name)
            self.engine.core.scheduler.cancel(name)

    @rule(seed=st.integers(0, 999), removed=st.booleans())
    def others_change(self, seed, removed):
        """Blocks of another worker, which cannot be read here: each is a miss."""
        self.seen |= self.engine.names()
        some = random.Random(seed).sample(sorted(self.seen), len(self.seen) // 2)
        changes = ((), some) if removed else (some, ())
        self.engine.core.tiers.note_elsewhere(*changes)

    @rule()
    def forget(self):
        self.engine.forget()
        self.forgotten = True

    @rule()
    def later(self):
        self.engine.now_ns += REST_NS

    @invariant()
    def whole(self):
        if hasattr(self, "engine"):
            self.engine.core.batch.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for name, prompt in self.names.items():
            if not prompt:  # others wait for a peer that there is not
                engine.core.scheduler.cancel(name)
        engine.run()
        for name, prompt in self.names.items():
            if prompt and name not in self.cancelled:
                assert engine.answer(name) == answer_of(tuple(prompt)), name
        engine.baseline()
        if self.forgotten:
            assert not any(tag_in(name) == tag_in(GONE) for name in engine.names())
        for number in range(5):  # what the tiers hold now is right, too
            engine.submit(f"last-{number}", prompt_of(number))
            engine.run()
            assert engine.answer(f"last-{number}") == answer_of(tuple(prompt_of(number)), 4)
        engine.baseline()


_GOLDEN: dict[tuple[int, ...], list[int]] = {}


def answer_of(prompt: tuple[int, ...], tokens: int = 3) -> list[int]:
    if prompt not in _GOLDEN:
        _GOLDEN[prompt] = golden(prompt)
    return _GOLDEN[prompt][:tokens]


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=examples(25), stateful_step_count=30, deadline=None
)
