"""Controller, registry, Ray and workers that disagree about who is alive come to agree again.

The real state machine and the real table of incarnations; Ray and its actors are played here.
Disturbances come in any order; when they cease and time passes, each slot has one serving worker,
which the controller knows by its epoch, and no process is left that it does not know. At no time
is a worker ended that serves and answers, unless an operator asked for it. One mechanism must not
hide the fault of another: each state has a bound, each epoch is used once, a late event has no
effect.
"""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.registry.types import WorkerRecord
from fleet.pools.controller import (
    BACKOFF_LIMIT_NS,
    DRAIN_LIMIT_NS,
    HEALTHY_AFTER_NS,
    START_LIMIT_NS,
    STOP_AGAIN_NS,
    FleetController,
)
from fleet.pools.lives import LifeTable
from fleet.pools.slots import SECOND_NS, Action, Drain, Launch, LivingWorker, Phase, Stop
from tests.soak import examples

SLOTS = ("worker-0", "worker-1")
LIMITS_NS = {
    Phase.WAITING: BACKOFF_LIMIT_NS,
    Phase.STARTING: START_LIMIT_NS,
    Phase.DRAINING: DRAIN_LIMIT_NS,
}


@dataclass(eq=False)
class Actor:
    """A process that Ray shows, in the bundle of its slot."""

    worker_id: str
    named: int
    epoch: int  # of the incarnation that it hosts
    alive: bool = True
    started: bool = False
    engine: bool = True
    answers: bool = True
    condemned: bool = False  # its end was decided, rightly

    @property
    def serves(self) -> bool:
        return self.alive and self.started and self.engine and self.answers


@dataclass(eq=False)
class Life:
    epoch: int
    named: int
    actor: Actor
    adopted: bool = False
    started: bool = False


@dataclass(eq=False)
class World:
    now: int = 0
    actors: list[Actor] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)  # the registry: worker id -> epoch
    old: dict[str, int] = field(default_factory=dict)  # what a fail-over may bring back
    kills_get_lost: bool = False
    stops_get_lost: bool = False

    def living(self, worker_id: str) -> list[Actor]:
        return [a for a in self.actors if a.alive and a.worker_id == worker_id]

    def kill(self, actor: Actor) -> None:
        assert actor.condemned or not actor.serves, "a serving worker is ended"
        actor.condemned = True
        actor.alive = actor.alive and self.kills_get_lost


class Controller:
    """The shell of the controller, as ``ray_controller`` has it, one step at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives = LifeTable()
        self.used = dict(world.slots)
        self.fleet = FleetController({"prefill": 1, "decode": 1}, world.now)
        for worker_id, epoch in world.slots.items():
            self.fleet.note_record(worker_id, epoch, "decode", 0)
        latest: dict[str, Actor] = {}
        for actor in sorted(world.actors, key=lambda actor: actor.named):
            if actor.alive:
                latest[actor.worker_id] = actor
        for worker_id, actor in latest.items():
            answered = actor.epoch if actor.answers else 0
            living = LivingWorker(
                worker_id,
                max(actor.named, answered),
                ready=actor.answers and actor.started,
                silent=not actor.answers,
            )
            self.fleet.adopt(living, world.now)
            epoch = self.fleet.slots[worker_id].epoch
            assert actor.answers or epoch >= world.slots.get(worker_id, 0)
            self.lives.add(worker_id, Life(epoch, actor.named, actor, adopted=True))
        self.fleet.settle(world.now)
        self.take(self.fleet.tick(world.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case WorkerRecord():
                    self.world.slots[action.worker_id] = action.epoch
                case Launch():
                    self.launch(action)
                case Drain():
                    done = self.fleet.drained(action.worker_id, action.epoch, self.world.now)
                    self.take(done)
                case Stop():
                    self.stop(action)

    def launch(self, launch: Launch) -> None:
        assert launch.epoch > self.used.get(launch.worker_id, 0), "an epoch is used twice"
        self.used[launch.worker_id] = launch.epoch
        last = self.lives.kept.pop(launch.worker_id, None) if launch.reuse else None
        assert (last is not None) is launch.reuse, "only a process that was kept is used again"
        if last is not None:
            actor = last.actor
            actor.epoch, actor.started, actor.engine = launch.epoch, False, True
            life = Life(launch.epoch, last.named, actor)
        elif launch.epoch in {actor.named for actor in self.world.living(launch.worker_id)}:
            self.ended(launch.worker_id, launch.epoch, "cannot place: the name is taken")
            return
        else:
            actor = Actor(launch.worker_id, launch.epoch, launch.epoch)
            self.world.actors.append(actor)
            life = Life(launch.epoch, launch.epoch, actor)
        if (earlier := self.lives.add(launch.worker_id, life)) is not None:
            self.world.kill(earlier.actor)

    def stop(self, stop: Stop) -> None:
        life = self.lives.of(stop.worker_id, stop.epoch)
        if life is not None and self.fleet.slots[stop.worker_id].phase is Phase.DRAINING:
            life.actor.condemned = True
        if life is None:
            self.ended(stop.worker_id, stop.epoch, "its process is gone")
        elif life.actor.alive and life.actor.answers and not self.world.stops_get_lost:
            assert life.actor.condemned or not life.actor.serves, "a serving worker is stopped"
            life.actor.engine = False
        else:
            self.world.kill(life.actor)

    def ended(self, worker_id: str, epoch: int, why: str, life: Life | None = None) -> None:
        reusable = life is not None and life.actor.alive and life.started
        if life is not None:
            self.lives.remove(worker_id, life)
        actions = self.fleet.ended(worker_id, epoch, why, self.world.now, reusable=reusable)
        if life is not None:
            if any(isinstance(action, Launch) and action.reuse for action in actions):
                self.lives.kept[worker_id] = life
            else:
                self.world.kill(life.actor)
        self.take(actions)

    def hear(self, worker_id: str, *, frozen: bool = False) -> None:
        """Report of a slot's incarnation to the controller, if it follows one."""
        life = self.lives.get(worker_id)
        if life is None:
            return
        actor = life.actor
        if not actor.alive:
            self.ended(worker_id, life.epoch, "its process died", life)
        elif not actor.answers:
            if frozen and life.started:
                life.started = False  # its actor cannot host another one
                self.ended(worker_id, life.epoch, "frozen", life)
        else:
            if life.adopted and (found := self.fleet.correct(worker_id, life.epoch, actor.epoch)):
                life.epoch = actor.epoch
                self.take(found)
            if actor.started and not life.started:
                life.started = True
                stopping = self.fleet.slots[worker_id].stopping
                actions = self.fleet.started(worker_id, life.epoch, self.world.now)
                assert not stopping or actions == [Stop(worker_id, life.epoch)]
                self.take(actions)
            if self.lives.get(worker_id) is life and not actor.engine:
                self.ended(worker_id, life.epoch, "exit code 1", life)

    def sweep(self) -> None:
        listed = [(actor.worker_id, actor.named) for actor in self.world.actors if actor.alive]
        for worker_id, named in self.lives.strangers(listed):
            for actor in self.world.living(worker_id):
                if actor.named == named:
                    self.world.kill(actor)


class Disagreements(RuleBasedStateMachine):
    """Any order of faults, restarts of the controller and orders."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.controller = Controller(self.world)
        for _ in range(5):
            self.time_passes(seconds=10)
        self.dies("worker-0", "engine")
        for _ in range(2):  # its process hosts the second incarnation
            self.time_passes(seconds=10)
        assert self.world.living("worker-0")[0].epoch == 2

    def start(self, worker_id: str) -> None:
        """Ray starts an actor when its slot's bundle is free."""
        living = self.world.living(worker_id)
        if living and living[0].answers:
            living[0].started = True

    @rule(worker_id=st.sampled_from(SLOTS))
    def starts(self, worker_id: str) -> None:
        self.start(worker_id)

    @rule(worker_id=st.sampled_from(SLOTS), frozen=st.booleans())
    def is_heard(self, worker_id: str, frozen: bool) -> None:
        self.controller.hear(worker_id, frozen=frozen)

    @rule(worker_id=st.sampled_from(SLOTS))
    def an_earlier_incarnation_is_heard(self, worker_id: str) -> None:
        fleet = self.controller.fleet
        epoch = fleet.slots[worker_id].epoch - 1
        assert fleet.started(worker_id, epoch, self.world.now) == []
        assert fleet.drained(worker_id, epoch, self.world.now) == []
        assert fleet.ended(worker_id, epoch, "late", self.world.now) == []

    @invariant()
    def each_state_has_an_end(self) -> None:
        for slot in self.controller.fleet.slots.values():
            limit = STOP_AGAIN_NS if slot.stopping else LIMITS_NS.get(slot.phase)
            assert limit is None or slot.due_ns <= self.world.now + limit

    @rule(worker_id=st.sampled_from(SLOTS), what=st.sampled_from(("engine", "process")))
    def dies(self, worker_id: str, what: str) -> None:
        for actor in self.world.living(worker_id):
            if what == "process":
                actor.alive = False
            elif actor.started:
                actor.engine = False

    @rule(worker_id=st.sampled_from(SLOTS), answers=st.booleans())
    def is_slow(self, worker_id: str, answers: bool) -> None:
        for actor in self.world.living(worker_id):
            actor.answers = answers

    @rule(kills=st.booleans(), stops=st.booleans())
    def calls_get_lost(self, kills: bool, stops: bool) -> None:
        self.world.kills_get_lost, self.world.stops_get_lost = kills, stops

    @rule(what=st.sampled_from(("kept", "lost", "brought back")))
    def the_registry_is(self, what: str) -> None:
        if what == "kept":
            self.world.old = dict(self.world.slots)
        else:
            self.world.slots = dict(self.world.old) if what == "brought back" else {}

    @rule()
    def the_controller_is_another(self) -> None:
        self.controller = Controller(self.world)

    @rule(worker_id=st.sampled_from(SLOTS), verb=st.sampled_from(("drain", "restart", "roll")))
    def an_operator_asks(self, worker_id: str, verb: str) -> None:
        fleet, now = self.controller.fleet, self.world.now
        if verb == "drain":
            self.controller.take(fleet.drain(worker_id, now))
        else:
            self.controller.take(fleet.restart([worker_id], now, rolling=verb == "roll"))

    @precondition(lambda self: self.world.now < 10_000 * SECOND_NS)
    @rule(seconds=st.sampled_from((1, 10, HEALTHY_AFTER_NS // SECOND_NS + 1, 301)))
    def time_passes(self, seconds: int) -> None:
        for worker_id in SLOTS if seconds > 1 else ():
            self.start(worker_id)
            self.controller.hear(worker_id, frozen=True)
        self.world.now += seconds * SECOND_NS
        self.controller.take(self.controller.fleet.tick(self.world.now))
        self.controller.sweep()
        if seconds > 1:  # it writes the slots every 5 s
            slots = self.controller.fleet.slots.values()
            self.world.slots |= {slot.worker_id: slot.epoch for slot in slots}

    def teardown(self) -> None:
        self.calls_get_lost(kills=False, stops=False)
        for actor in self.world.actors:
            actor.answers = True
        for _ in range(80):
            self.time_passes(seconds=10)
        slots = self.controller.fleet.slots
        assert set(slots) == set(SLOTS)
        for worker_id, slot in slots.items():
            living = self.world.living(worker_id)
            if slot.phase is Phase.PARKED:
                assert living == []
                continue
            assert slot.phase is Phase.READY
            (actor,) = living
            assert actor.started and actor.engine and actor.epoch == slot.epoch
            assert self.world.slots.get(worker_id, slot.epoch) == slot.epoch


Disagreements.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=25, deadline=None
)
TestDisagreements = Disagreements.TestCase


def test_the_table_follows_one_incarnation_of_a_slot() -> None:
    table = LifeTable()
    first, second = (Life(n, n, Actor("worker-0", n, n)) for n in (1, 2))
    assert table.add("worker-0", first) is None
    assert table.add("worker-0", second) is first
    table.remove("worker-0", first)
    assert table.get("worker-0") is table.of("worker-0", 2) is second
    assert table.of("worker-0", 1) is None


def test_a_stranger_is_seen_twice_and_neither_followed_nor_kept() -> None:
    table = LifeTable()
    followed, kept = (Life(n + 4, n, Actor("worker-0", n, n + 4)) for n in (1, 2))
    table.add("worker-0", followed)
    table.kept["worker-0"] = kept
    listed = [("worker-0", named) for named in (1, 2, 5)]
    assert table.strangers(listed) == []
    assert table.strangers(listed) == [("worker-0", 5)]
    assert table.strangers([]) == []
    assert table.strangers(listed) == []
