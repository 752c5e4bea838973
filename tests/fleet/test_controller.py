"""The controller keeps the pools at size: one life per slot, counted, with back-off."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.registry.types import WorkerRecord
from fleet.pools.controller import (
    BACKOFF_LIMIT_NS,
    DRAIN_LIMIT_NS,
    HEALTHY_AFTER_NS,
    KNOWN_AFTER_NS,
    START_LIMIT_NS,
    STOP_AGAIN_NS,
    FleetController,
)
from fleet.pools.slots import (
    BACKOFF_FIRST_NS,
    SECOND_NS,
    Action,
    ChangeRole,
    Drain,
    Launch,
    LivingWorker,
    Phase,
    Remove,
    Stop,
)
from tests.soak import examples


def only(kind: type, actions: list[Action]) -> list[str]:
    return [action.worker_id for action in actions if isinstance(action, kind)]


def running(prefill: int = 1, decode: int = 1) -> FleetController:
    fleet = FleetController({"prefill": prefill, "decode": decode}, 0)
    fleet.tick(0)
    for slot in fleet.slots.values():
        fleet.started(slot.worker_id, 1, 0)
    assert fleet.ready
    return fleet


def test_every_slot_is_launched_with_epoch_one() -> None:
    fleet = FleetController({"prefill": 2, "decode": 1}, 0)
    launches = [action for action in fleet.tick(0) if isinstance(action, Launch)]
    assert launches == [
        Launch("worker-0", "prefill", 1),
        Launch("worker-1", "prefill", 1),
        Launch("worker-2", "decode", 1),
    ]
    assert not fleet.ready


def test_a_crashed_worker_comes_back_as_its_next_life() -> None:
    fleet = running()
    (dead,) = fleet.ended("worker-1", 1, "killed by signal 9", SECOND_NS)
    assert isinstance(dead, WorkerRecord) and (dead.worker_id, dead.role) == ("worker-1", "decode")
    assert (dead.state, dead.epoch, dead.reason) == ("dead", 1, "killed by signal 9")
    assert fleet.next_due_ns == SECOND_NS + BACKOFF_FIRST_NS
    assert not fleet.tick(fleet.next_due_ns - 1)
    actions = fleet.tick(fleet.next_due_ns)
    assert actions[-1] == Launch("worker-1", "decode", 2)


def test_a_healthy_life_is_followed_at_once_in_its_process() -> None:
    fleet = running()
    *_, launch = fleet.ended("worker-1", 1, "killed", HEALTHY_AFTER_NS, reusable=True)
    assert launch == Launch("worker-1", "decode", 2, reuse=True)
    # A process that fails to begin another life is not tried again.
    fleet.ended("worker-1", 2, "failed", HEALTHY_AFTER_NS)
    *_, launch = fleet.tick(fleet.next_due_ns)
    assert launch == Launch("worker-1", "decode", 3, reuse=False)


def test_a_slot_that_fails_to_start_twice_is_tried_elsewhere() -> None:
    fleet = running()
    moves = []
    for epoch in range(1, 7):  # the first one has served
        fleet.ended("worker-1", epoch, "no space left on device", SECOND_NS)
        launch = fleet.tick(fleet.next_due_ns)[-1]
        assert isinstance(launch, Launch)
        moves.append(launch.move)
    assert moves == [False, False, True, False, True, False]


def test_the_process_of_a_short_or_unwanted_life_is_not_used_again() -> None:
    fleet = running(prefill=2)
    fleet.ended("worker-2", 1, "killed", HEALTHY_AFTER_NS - 1, reusable=True)
    assert fleet.tick(fleet.next_due_ns)[-1] == Launch("worker-2", "decode", 2)
    fleet.drain("worker-0", 0)
    assert not only(Launch, fleet.ended("worker-0", 1, "", HEALTHY_AFTER_NS, reusable=True))
    fleet.stop(0)
    assert not only(Launch, fleet.ended("worker-1", 1, "", HEALTHY_AFTER_NS, reusable=True))


def test_repeated_crashes_wait_longer_up_to_a_limit_and_a_healthy_life_resets_it() -> None:
    fleet, now, waits = running(), 0, []
    for epoch in range(1, 10):
        fleet.ended("worker-1", epoch, "crash", now)
        waits.append(fleet.next_due_ns - now)
        now = fleet.next_due_ns
        fleet.tick(now)
        fleet.started("worker-1", epoch + 1, now)
    assert waits[:4] == [BACKOFF_FIRST_NS, SECOND_NS, 2 * SECOND_NS, 4 * SECOND_NS]
    assert waits[-1] == BACKOFF_LIMIT_NS

    now += HEALTHY_AFTER_NS
    assert only(Launch, fleet.ended("worker-1", 10, "crash", now)) == ["worker-1"], "at once"
    fleet.ended("worker-1", 11, "crash", now)
    assert fleet.next_due_ns - now == BACKOFF_FIRST_NS


def test_news_of_an_earlier_life_changes_nothing() -> None:
    fleet = running()
    fleet.ended("worker-1", 1, "crash", 0)
    fleet.tick(BACKOFF_FIRST_NS)
    assert fleet.ended("worker-1", 1, "crash, told twice", BACKOFF_FIRST_NS) == []
    assert fleet.started("worker-1", 1, BACKOFF_FIRST_NS) == []
    assert fleet.slots["worker-1"].phase is Phase.STARTING


def test_a_start_that_hangs_is_ended_and_tried_again() -> None:
    fleet = FleetController({"decode": 1}, 0)
    fleet.tick(0)
    assert only(Stop, fleet.tick(START_LIMIT_NS)) == ["worker-0"]
    assert not only(Stop, fleet.tick(START_LIMIT_NS + 1)), "it is told once"
    (dead,) = fleet.ended("worker-0", 1, "exit code -9", START_LIMIT_NS)
    assert isinstance(dead, WorkerRecord) and "did not start within 300 s" in dead.reason


def test_a_drained_worker_stays_down_until_it_is_restarted() -> None:
    fleet = running()
    actions = fleet.drain("worker-1", 0)
    assert actions[-1] == Drain("worker-1", 1, DRAIN_LIMIT_NS)
    assert only(Stop, fleet.drained("worker-1", 1, 5)) == ["worker-1"]
    fleet.ended("worker-1", 1, "exit code 0", 6)
    assert fleet.slots["worker-1"].phase is Phase.PARKED
    assert fleet.slots["worker-1"].describe().intent == "park"
    assert fleet.slots["worker-0"].describe().intent == "serve"
    assert not fleet.tick(10 * START_LIMIT_NS)
    assert only(Launch, fleet.restart(["worker-1"], 20, rolling=False)) == ["worker-1"]


def test_a_restart_of_all_leaves_those_down_that_an_operator_has_drained() -> None:
    for rolling in (False, True):
        fleet = running(decode=2)
        fleet.drain("worker-2", 0)
        assert fleet.drained_workers == ("worker-2",), "from the order on"
        for renewed in (False, True):  # while it drains, and when it is down
            fleet.restart(["worker-2"], 5, rolling=rolling, revive=False)
            assert fleet.slots["worker-2"].phase is not Phase.WAITING
            fleet.drained("worker-2", 1, 5)
            fleet.ended("worker-2", 1, "exit code 0", 6)
            assert fleet.slots["worker-2"].phase is Phase.PARKED, renewed
        assert fleet.drained_workers == ("worker-2",)
        fleet.restart(["worker-2"], KNOWN_AFTER_NS, rolling=rolling)
        assert fleet.drained_workers == ()


def test_a_worker_that_is_drained_before_its_turn_stays_down_in_a_rolling_restart() -> None:
    fleet = running(decode=2)
    now = KNOWN_AFTER_NS
    fleet.restart(["worker-1", "worker-2"], now, rolling=True)
    fleet.drain("worker-2", now)
    fleet.drained("worker-2", 1, now)
    fleet.ended("worker-2", 1, "exit code 0", now)
    fleet.drained("worker-1", 1, now)
    fleet.ended("worker-1", 1, "exit code 0", now)
    fleet.started("worker-1", 2, now)
    fleet.tick(2 * now)
    assert fleet.slots["worker-1"].epoch == 2
    assert fleet.slots["worker-2"].phase is Phase.PARKED


def test_a_drain_that_takes_too_long_is_ended() -> None:
    fleet = running()
    fleet.drain("worker-1", 0)
    assert only(Stop, fleet.tick(DRAIN_LIMIT_NS)) == ["worker-1"]


def test_a_rolling_restart_takes_one_worker_at_a_time() -> None:
    fleet = running(prefill=2, decode=1)
    order = ["worker-0", "worker-1", "worker-2"]
    now = KNOWN_AFTER_NS
    actions = fleet.restart(order, now, rolling=True)
    for worker_id in order:
        assert only(Drain, actions) == [worker_id]
        assert only(Stop, fleet.drained(worker_id, 1, now)) == [worker_id]
        assert only(Launch, fleet.ended(worker_id, 1, "exit code 0", now)) == [worker_id]
        # Routers connect to it first: until then the next one may be the only one that they know.
        assert only(Drain, fleet.started(worker_id, 2, now)) == []
        assert only(Drain, fleet.tick(now + KNOWN_AFTER_NS - 1)) == []
        now += KNOWN_AFTER_NS
        actions = fleet.tick(now)
    assert only(Drain, actions) == []
    assert [slot.epoch for slot in fleet.slots.values()] == [2, 2, 2]


def test_scaling_in_takes_the_highest_numbers_and_scaling_out_counts_their_lives_on() -> None:
    fleet = running(prefill=3)
    assert only(Drain, fleet.resize({"prefill": 1}, 0)) == ["worker-2", "worker-1"]
    for name in ("worker-1", "worker-2"):
        fleet.drained(name, 1, 1)
        assert only(Remove, fleet.ended(name, 1, "exit code 0", 2)) == [name]
    assert set(fleet.slots) == {"worker-0", "worker-3"}
    actions = fleet.resize({"prefill": 2}, 3)
    assert actions[-1] == Launch("worker-1", "prefill", 2)


def test_a_new_controller_adopts_the_lives_it_finds() -> None:
    fleet = FleetController({"prefill": 1, "decode": 1}, 0)
    fleet.adopt(LivingWorker("worker-1", 4, ready=True), 0)
    assert only(Launch, fleet.tick(0)) == ["worker-0"]
    fleet.ended("worker-1", 4, "crash", 0)
    assert Launch("worker-1", "decode", 5) in fleet.tick(BACKOFF_FIRST_NS)


def roles(fleet: FleetController) -> dict[str, str]:
    return {name: slot.role for name, slot in fleet.slots.items()}


def test_a_resize_turns_workers_before_it_starts_or_stops_any() -> None:
    fleet = running(prefill=2, decode=2)
    actions = fleet.resize({"prefill": 1, "decode": 4}, 5)
    assert actions[0] == ChangeRole("worker-1", "decode", 1, 1)
    assert only(Launch, actions) == ["worker-4"]
    assert not only(Drain, actions) + only(Stop, actions)
    assert fleet.slots["worker-1"].phase is Phase.READY
    assert roles(fleet)["worker-1"] == "decode"
    assert fleet.wanted == {"prefill": 1, "decode": 4}


def test_workers_leave_in_the_order_that_is_given_but_those_that_start_go_first() -> None:
    fleet = running(prefill=1, decode=3)
    order = {"worker-1": (2,), "worker-2": (1,), "worker-3": (3,)}
    actions = fleet.resize({"decode": 2}, 5, leaving_order=lambda name: order.get(name, (0,)))
    assert only(Drain, actions) == ["worker-2"]
    fleet.resize({"decode": 3}, 6)
    actions = fleet.resize({"decode": 2}, 7, leaving_order=lambda name: order.get(name, (9,)))
    assert only(Drain, actions) == [], "worker-4 has only been launched"


def test_a_worker_may_wait_long_for_a_node_but_not_start_for_long() -> None:
    hour_ns = 3600 * SECOND_NS
    fleet = FleetController({"decode": 1}, 0, place_limit_ns=hour_ns)
    fleet.tick(0)
    assert not fleet.tick(hour_ns - 1)
    fleet.placed("worker-0", 1, hour_ns - 1)
    assert not fleet.tick(hour_ns + START_LIMIT_NS - 2)
    assert only(Stop, fleet.tick(hour_ns + START_LIMIT_NS)) == ["worker-0"]


def test_a_turned_worker_keeps_its_role_over_its_lives() -> None:
    fleet = running(prefill=2, decode=1)
    fleet.change_role("worker-1", "decode", 1)
    fleet.ended("worker-1", 1, "crash", 2)
    launch = fleet.tick(fleet.next_due_ns)[-1]
    assert launch == Launch("worker-1", "decode", 2, turn=1)
    assert not only(ChangeRole, fleet.started("worker-1", 2, fleet.next_due_ns)), "it knows"
    assert fleet.wanted == {"prefill": 1, "decode": 2}


def test_a_worker_that_turns_while_it_starts_is_told_when_it_has_started() -> None:
    fleet = FleetController({"prefill": 2, "decode": 1}, 0)
    fleet.tick(0)
    (published,) = fleet.change_role("worker-1", "decode", 1)
    assert isinstance(published, WorkerRecord) and (published.role, published.turn) == ("decode", 1)
    assert ChangeRole("worker-1", "decode", 1, 1) in fleet.started("worker-1", 1, 2)


def test_a_worker_that_may_not_turn_is_drained_and_another_is_started() -> None:
    fleet = running(prefill=2, decode=1)
    actions = fleet.resize({"prefill": 1, "decode": 2}, 5, lambda name, role: False)
    assert (only(ChangeRole, actions), only(Drain, actions)) == ([], ["worker-1"])
    assert only(Launch, actions) == ["worker-3"]


def test_a_drained_worker_does_not_turn_and_is_removed_first() -> None:
    fleet = running(prefill=2, decode=1)
    fleet.drain("worker-0", 0)
    fleet.drained("worker-0", 1, 1)
    fleet.ended("worker-0", 1, "exit code 0", 2)
    actions = fleet.resize({"prefill": 1, "decode": 1}, 3)
    assert only(Remove, actions) == ["worker-0"]
    assert set(fleet.slots) == {"worker-1", "worker-2"}


def test_a_new_controller_knows_the_roles_of_the_old_one() -> None:
    """From the workers, and from the registry for those that are down at the moment."""
    fleet = FleetController({"prefill": 1, "decode": 2}, 0)
    fleet.note_record("worker-0", 3, "decode", 5)
    fleet.note_record("worker-1", 1, "prefill", 6)
    fleet.adopt(LivingWorker("worker-1", 1, ready=True, role="prefill", turn=6), 0)
    fleet.adopt(LivingWorker("worker-2", 1, ready=True, role="decode", turn=0), 0)
    fleet.settle(0)
    actions = fleet.tick(0)
    assert roles(fleet) == {"worker-0": "decode", "worker-1": "prefill", "worker-2": "decode"}
    assert only(Launch, actions) == ["worker-0"]
    fleet.resize({"prefill": 2, "decode": 1}, 1)
    assert fleet.slots["worker-2"].turn == 7, "numbers go on"


def test_a_turn_that_only_the_registry_knows_is_told_to_its_worker() -> None:
    fleet = FleetController({"prefill": 1, "decode": 1}, 0)
    fleet.note_record("worker-1", 1, "prefill", 4)
    fleet.note_record("worker-0", 1, "decode", 3)
    fleet.adopt(LivingWorker("worker-1", 1, ready=False, role="decode", turn=0), 0)
    assert ChangeRole("worker-1", "prefill", 1, 4) in fleet.started("worker-1", 1, 1)


class AnyFleet(RuleBasedStateMachine):
    """Random operators and crashes: the world as Ray shows it stays consistent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.fleet = FleetController({"prefill": 2, "decode": 2}, 0)
        self.alive: dict[str, int] = {}  # worker id -> epoch of the process that runs
        self.epochs: dict[str, int] = {}
        self.told: dict[str, tuple[str, int]] = {}  # role and turn that each worker knows
        self.take(self.fleet.tick(0))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    assert action.worker_id not in self.alive, "two lives of one slot"
                    assert action.epoch == self.epochs.get(action.worker_id, 0) + 1
                    assert not self.fleet.stopped
                    self.alive[action.worker_id] = action.epoch
                    self.epochs[action.worker_id] = action.epoch
                    self.told[action.worker_id] = (action.role, action.turn)
                case ChangeRole():
                    assert self.alive.get(action.worker_id) == action.epoch
                    assert action.turn > self.told[action.worker_id][1]
                    self.told[action.worker_id] = (action.role, action.turn)
                case Drain() | Stop():
                    assert self.alive.get(action.worker_id) == action.epoch
                case Remove():
                    assert action.worker_id not in self.alive

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_worker_starts_ends_or_drains(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        epoch = self.alive[name]
        match data.draw(st.sampled_from(["started", "ended", "drained"])):
            case "started":
                self.take(self.fleet.started(name, epoch, self.now))
            case "drained":
                self.take(self.fleet.drained(name, epoch, self.now))
            case _:
                del self.alive[name]
                self.take(self.fleet.ended(name, epoch, "ended", self.now))

    @rule(seconds=st.sampled_from([0, 1, 31, 301]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND_NS
        self.take(self.fleet.tick(self.now))

    @rule(role=st.sampled_from(["prefill", "decode"]), replicas=st.integers(0, 3))
    def resize(self, role: str, replicas: int) -> None:
        self.take(self.fleet.resize({role: replicas}, self.now))

    @rule(prefill=st.integers(0, 3), decode=st.integers(0, 3), turns=st.booleans())
    def resize_both(self, prefill: int, decode: int, turns: bool) -> None:
        sizes = {"prefill": prefill, "decode": decode}
        self.take(self.fleet.resize(sizes, self.now, lambda name, role: turns))

    @rule(data=st.data(), role=st.sampled_from(["prefill", "decode"]))
    def change_role(self, data: st.DataObject, role: str) -> None:
        if self.fleet.slots:
            name = data.draw(st.sampled_from(sorted(self.fleet.slots)))
            self.take(self.fleet.change_role(name, role, self.now))

    @rule(data=st.data(), what=st.sampled_from(["drain", "restart", "roll"]))
    def an_operator_asks(self, data: st.DataObject, what: str) -> None:
        if not self.fleet.slots:
            return
        name = data.draw(st.sampled_from(sorted(self.fleet.slots)))
        if what == "drain":
            self.take(self.fleet.drain(name, self.now))
        else:
            self.take(self.fleet.restart([name], self.now, rolling=what == "roll"))

    @invariant()
    def a_slot_with_a_process_is_known_to_have_one(self) -> None:
        for name, slot in self.fleet.slots.items():
            assert (slot.phase in (Phase.WAITING, Phase.PARKED)) == (name not in self.alive)
        assert set(self.alive) <= set(self.fleet.slots)

    @invariant()
    def the_pools_have_the_sizes_that_are_asked_for(self) -> None:
        staying = [slot.role for slot in self.fleet.slots.values() if not slot.leaving]
        for role, size in self.fleet.wanted.items():
            assert staying.count(role) == size

    @invariant()
    def a_ready_worker_knows_its_role(self) -> None:
        for name, slot in self.fleet.slots.items():
            if slot.phase is Phase.READY:
                assert self.told[name] == (slot.role, slot.turn)

    def teardown(self) -> None:
        """From anywhere, a stop ends everything."""
        self.take(self.fleet.stop(self.now))
        for name, epoch in list(self.alive.items()):
            del self.alive[name]
            self.take(self.fleet.ended(name, epoch, "exit code 0", self.now))
        self.take(self.fleet.tick(self.now + START_LIMIT_NS))
        assert self.fleet.idle and not self.alive


AnyFleet.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=30, deadline=None
)
TestAnyFleet = AnyFleet.TestCase


def test_a_life_that_is_stopped_while_it_is_placed_is_stopped_when_it_comes() -> None:
    """Defect 5c: the first Stop finds nobody; the life must hear a second one."""
    fleet = FleetController({"prefill": 1, "decode": 0}, 0)
    fleet.tick(0)
    assert only(Stop, fleet.drain("worker-0", 1)) == ["worker-0"]
    assert not fleet.wants("worker-0", 1)
    assert fleet.started("worker-0", 1, 2) == [Stop("worker-0", 1)]
    fleet.ended("worker-0", 1, "exit code 0", 3)
    assert only(Launch, fleet.restart(["worker-0"], 4, rolling=False)) == ["worker-0"]
    assert fleet.wants("worker-0", 2)


def test_epochs_go_on_behind_lives_that_an_earlier_controller_started() -> None:
    """Defect 5e: an epoch that was given once is not given again, whoever remembers it."""
    fleet = FleetController({"prefill": 1, "decode": 1}, 0)
    fleet.note_epoch("worker-0", 7)
    fleet.note_epoch("worker-2", 3)  # a slot that is not there at present
    assert [action.epoch for action in fleet.tick(0) if isinstance(action, Launch)] == [8, 1]
    fleet.note_epoch("worker-0", 9)  # of a life that is running: known better here
    assert fleet.slots["worker-0"].epoch == 8
    launched = fleet.resize({"decode": 2}, 1)
    assert [action.epoch for action in launched if isinstance(action, Launch)] == [4]


def test_a_life_that_the_registry_names_too_is_adopted() -> None:
    fleet = FleetController({"prefill": 1, "decode": 0}, 0)
    fleet.note_epoch("worker-0", 4)
    fleet.adopt(LivingWorker("worker-0", 4, ready=False), 0)
    assert only(Launch, fleet.tick(0)) == []
    fleet.started("worker-0", 4, 1)
    assert fleet.ready


def test_a_silent_life_is_adopted_as_the_latest_and_corrected_when_it_answers() -> None:
    """Its actor may be named after an earlier life, whose process it took over."""
    fleet = FleetController({"prefill": 1, "decode": 0}, 0)
    fleet.note_record("worker-0", 4, "prefill", 0)
    fleet.adopt(LivingWorker("worker-0", 1, ready=False, silent=True), 0)
    assert only(Launch, fleet.tick(0)) == []
    assert fleet.slots["worker-0"].epoch == 4
    (shown,) = fleet.correct("worker-0", 4, 3)
    assert isinstance(shown, WorkerRecord) and shown.epoch == 3
    assert fleet.correct("worker-0", 4, 2) == [], "of a life that it is not"
    fleet.started("worker-0", 3, 1)
    assert fleet.ready
    fleet.ended("worker-0", 3, "crash", 2)
    assert fleet.tick(BACKOFF_FIRST_NS + 2)[-1] == Launch("worker-0", "prefill", 5)


def test_a_stop_that_may_be_lost_is_repeated_until_the_end() -> None:
    fleet = running()
    fleet.drain("worker-1", 0)
    assert only(Stop, fleet.drained("worker-1", 1, 5)) == ["worker-1"]
    assert not only(Stop, fleet.tick(STOP_AGAIN_NS))
    assert fleet.next_due_ns == 5 + STOP_AGAIN_NS
    assert only(Stop, fleet.tick(5 + STOP_AGAIN_NS)) == ["worker-1"]
    fleet.ended("worker-1", 1, "exit code 0", 2 * STOP_AGAIN_NS)
    assert not only(Stop, fleet.tick(9 * STOP_AGAIN_NS))
