"""The controller's decisions: which life of which slot to start, drain, stop. Does no I/O.

A pool is a row of slots ``prefill-0, prefill-1 ...``; a slot has lives, numbered by ``epoch``:

            launch                started                drain             ended
    WAITING ------> STARTING ------------> READY ------> DRAINING ------> WAITING | PARKED | gone
       ^   back-off     |                    |
       +----------------+--------------------+   ended (crash, start limit)

Events come in through methods, with the time in integer nanoseconds; each returns the actions to
take. Actions about a life carry its epoch, so that an answer about an earlier one changes nothing.
"""

import enum
from dataclasses import dataclass

from baton.registry.types import Role, WorkerState

SECOND_NS = 1_000_000_000

BACKOFF_FIRST_NS = SECOND_NS // 2
BACKOFF_LIMIT_NS = 30 * SECOND_NS
HEALTHY_AFTER_NS = 30 * SECOND_NS
START_LIMIT_NS = 300 * SECOND_NS
DRAIN_LIMIT_NS = 30 * SECOND_NS
MOVED_AFTER_STARTS = 2  # that failed: the node may be why, its disk full, say
_NEVER_NS = 1 << 62


class Phase(enum.Enum):
    """What a slot is doing."""

    WAITING = "waiting"  # no process; one will be started at `due_ns`
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    PARKED = "parked"  # drained by an operator; stays empty until restarted


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a new life of a slot."""

    worker_id: str
    role: Role
    epoch: int
    reuse: bool = False  # of the process that the last life ran in
    move: bool = False  # to another place than the last life's


@dataclass(frozen=True, slots=True)
class Drain:
    """Move this life's requests away, then report ``drained``."""

    worker_id: str
    epoch: int
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End this life's processes, then report ``ended``."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the registry about a slot."""

    worker_id: str
    role: Role
    state: WorkerState
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """The slot no longer exists: free its placement."""

    worker_id: str


Action = Launch | Drain | Stop | Publish | Remove


@dataclass(slots=True)
class Slot:
    """One place of a pool."""

    worker_id: str
    role: Role
    phase: Phase = Phase.WAITING
    epoch: int = 0
    since_ns: int = 0  # when the phase began
    due_ns: int = 0  # WAITING: start then; STARTING, DRAINING: give up then
    backoff_ns: int = BACKOFF_FIRST_NS  # for the next crash of a short life
    reason: str = ""
    after_drain: Phase = Phase.WAITING  # where DRAINING leads to
    leaving: bool = False  # removed from its pool
    stopping: bool = False  # Stop was sent for this life
    reusable: bool = False  # the last life was healthy, and its process is still there
    moving: bool = False  # the next life shall have another place
    failed_starts: int = 0  # of lives in a row that were never ready


class FleetController:
    """The state of all slots.

    Args:
        pools: Replicas wanted by role.
        now_ns: The time. Call `tick` for the first actions.
        healthy_after_ns: A life so long is followed at once, in the same process where that is
            still there, and resets the back-off.
    """

    def __init__(
        self, pools: dict[Role, int], now_ns: int, healthy_after_ns: int = HEALTHY_AFTER_NS
    ) -> None:
        self.slots: dict[str, Slot] = {}
        self.stopped = False
        self._healthy_after_ns = healthy_after_ns
        self._rolling: list[str] = []
        self._wanted = dict(pools)
        self._past_epochs: dict[str, int] = {}
        self._fill(now_ns)

    # ---- what operators ask ---------------------------------------------------------------------

    def resize(self, role: Role, replicas: int, now_ns: int) -> list[Action]:
        """Change a pool's size; the highest numbers leave first."""
        self._wanted[role] = replicas
        actions: list[Action] = []
        for slot in [slot for slot in self.slots.values() if slot.role == role]:
            leaving = _index(slot.worker_id) >= replicas
            if leaving and not slot.leaving:
                slot.leaving = True
                actions += self._begin_drain(slot, "scale-in", Phase.PARKED, now_ns)
            elif not leaving and slot.leaving:
                slot.leaving = False
                slot.after_drain = Phase.WAITING
        self._fill(now_ns)
        return actions + self.tick(now_ns)

    def drain(self, worker_id: str, now_ns: int) -> list[Action]:
        """Take one worker out of traffic, and its processes down, until it is restarted."""
        slot = self.slots[worker_id]
        self._rolling = [name for name in self._rolling if name != worker_id]
        return self._begin_drain(slot, "drained by an operator", Phase.PARKED, now_ns)

    def restart(
        self,
        worker_ids: list[str],
        now_ns: int,
        *,
        rolling: bool,
        move: bool = False,
        revive: bool = True,
    ) -> list[Action]:
        """Give each slot a new life: all at once, or one after another, each drained first.

        Args:
            worker_ids: Of the slots.
            now_ns: The time.
            rolling: One after another.
            move: Each gives up its place for another one.
            revive: Workers that an operator has drained begin a life too.
        """
        for name in worker_ids:
            self.slots[name].moving |= move
        if not revive:
            worker_ids = [name for name in worker_ids if name not in self.drained_workers]
        if rolling:
            self._rolling += [name for name in worker_ids if name not in self._rolling]
            return self.tick(now_ns)
        actions: list[Action] = []
        for name in worker_ids:
            slot = self.slots[name]
            actions += self._renew(slot, now_ns)
            if slot.phase is Phase.DRAINING:
                actions += self._stop_life(slot)
        return actions + self.tick(now_ns)

    def stop(self, now_ns: int) -> list[Action]:
        """End everything; nothing is started again."""
        self.stopped = True
        self._rolling.clear()
        actions: list[Action] = []
        for slot in self.slots.values():
            if slot.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING):
                slot.after_drain = Phase.PARKED
                actions += self._stop_life(slot)
            else:
                self._enter(slot, Phase.PARKED, now_ns)
        return actions

    def adopt(self, worker_id: str, epoch: int, *, ready: bool, now_ns: int) -> None:
        """A life that an earlier controller started is still there.

        One beyond its pool's size gets a slot too: the next `resize` drains it.
        """
        slot = self.slots.get(worker_id)
        if slot is None:
            role: Role = "prefill" if worker_id.startswith("prefill") else "decode"
            slot = self.slots[worker_id] = Slot(worker_id, role)
        if epoch < slot.epoch or slot.phase is not Phase.WAITING:
            return
        slot.epoch = epoch
        self._enter(slot, Phase.READY if ready else Phase.STARTING, now_ns)
        if not ready:
            slot.due_ns = now_ns + START_LIMIT_NS

    def note_epoch(self, worker_id: str, epoch: int) -> None:
        """A life of that number is known to have been: the next one is counted from there."""
        slot = self.slots.get(worker_id)
        if slot is None:
            self._past_epochs[worker_id] = max(epoch, self._past_epochs.get(worker_id, 0))
        elif slot.phase is Phase.WAITING:
            slot.epoch = max(epoch, slot.epoch)

    def wants(self, worker_id: str, epoch: int) -> bool:
        """Whether a life that is being placed is still to be started."""
        slot = self._current(worker_id, epoch)
        return slot is not None and slot.phase is Phase.STARTING and not slot.stopping

    # ---- what happens ---------------------------------------------------------------------------

    def started(self, worker_id: str, epoch: int, now_ns: int) -> list[Action]:
        """A life has loaded its model and takes requests."""
        slot = self._current(worker_id, epoch)
        if slot is None:
            return []
        if slot.stopping:  # the word to stop came before there was anybody to hear it
            return [Stop(worker_id, epoch)]
        if slot.phase is not Phase.STARTING:
            return []
        self._enter(slot, Phase.READY, now_ns)
        slot.failed_starts = 0
        slot.reason = ""
        return [self.describe(slot), *self.tick(now_ns)]

    def drained(self, worker_id: str, epoch: int, now_ns: int) -> list[Action]:
        """A draining life holds no request any more."""
        slot = self._current(worker_id, epoch)
        return self._stop_life(slot) if slot and slot.phase is Phase.DRAINING else []

    def ended(
        self, worker_id: str, epoch: int, reason: str, now_ns: int, *, reusable: bool = False
    ) -> list[Action]:
        """A life is gone, wanted or not.

        Args:
            worker_id: Of the slot.
            epoch: The life.
            reason: Why it ended.
            now_ns: The time.
            reusable: Its engine alone is gone; the process around it can begin another life. It
                does if a ``Launch`` with ``reuse`` comes back; else it must end.
        """
        slot = self._current(worker_id, epoch)
        if slot is None or slot.phase in (Phase.WAITING, Phase.PARKED):
            return []
        asked_for = slot.phase is Phase.DRAINING or (slot.stopping and self.stopped)
        if asked_for:
            self._enter(slot, slot.after_drain, now_ns)
        else:
            lived_ns = now_ns - slot.since_ns if slot.phase is Phase.READY else 0
            slot.failed_starts += slot.phase is Phase.STARTING
            slot.moving |= slot.failed_starts >= MOVED_AFTER_STARTS
            slot.reason = slot.reason if slot.stopping else reason
            self._enter(slot, Phase.WAITING, now_ns)  # due now, which is right for a healthy one
            if lived_ns >= self._healthy_after_ns:
                slot.backoff_ns = BACKOFF_FIRST_NS
                slot.reusable = reusable
            else:
                slot.due_ns = now_ns + slot.backoff_ns
                slot.backoff_ns = min(2 * slot.backoff_ns, BACKOFF_LIMIT_NS)
        if slot.leaving:
            return [*self._retire(slot), *self.tick(now_ns)]
        return [self.describe(slot), *self.tick(now_ns)]

    def tick(self, now_ns: int) -> list[Action]:
        """Let time pass: start what is due, give up on what takes too long."""
        actions: list[Action] = []
        for slot in list(self.slots.values()):
            if slot.due_ns > now_ns:
                continue
            if slot.phase is Phase.WAITING and not self.stopped:
                actions += self._launch(slot, now_ns)
            elif slot.phase is Phase.STARTING:
                slot.reason = f"did not start within {START_LIMIT_NS // SECOND_NS} s"
                actions += self._stop_life(slot)
            elif slot.phase is Phase.DRAINING:
                actions += self._stop_life(slot)
        return actions + self._roll(now_ns)

    @property
    def drained_workers(self) -> tuple[str, ...]:
        """The workers that an operator has drained, or is draining."""
        if self.stopped:
            return ()
        down = (Phase.PARKED, Phase.DRAINING)
        return tuple(
            slot.worker_id
            for slot in self.slots.values()
            if slot.phase in down and slot.after_drain is Phase.PARKED and not slot.leaving
        )

    @property
    def wanted(self) -> dict[Role, int]:
        """The pools' sizes, as last asked for."""
        return dict(self._wanted)

    @property
    def next_due_ns(self) -> int:
        """When `tick` has something to do next, if nothing happens before."""
        timed = (Phase.WAITING, Phase.STARTING, Phase.DRAINING)
        due = [slot.due_ns for slot in self.slots.values() if slot.phase in timed]
        return min(due, default=_NEVER_NS)

    @property
    def ready(self) -> bool:
        """Whether every slot that should run does."""
        in_use = [slot for slot in self.slots.values() if slot.phase is not Phase.PARKED]
        return all(slot.phase is Phase.READY for slot in in_use)

    @property
    def idle(self) -> bool:
        """Whether no slot has a process."""
        return all(slot.phase in (Phase.WAITING, Phase.PARKED) for slot in self.slots.values())

    def describe(self, slot: Slot) -> Publish:
        """What the registry should say of a slot."""
        states: dict[Phase, WorkerState] = {
            Phase.WAITING: "dead" if slot.epoch else "starting",
            Phase.STARTING: "starting",
            Phase.READY: "ready",
            Phase.DRAINING: "draining",
            Phase.PARKED: "dead",
        }
        return Publish(slot.worker_id, slot.role, states[slot.phase], slot.epoch, slot.reason)

    # ---- inner ----------------------------------------------------------------------------------

    def _fill(self, now_ns: int) -> None:
        for role, replicas in self._wanted.items():
            for index in range(replicas):
                worker_id = f"{role}-{index}"
                if worker_id not in self.slots:
                    epoch = self._past_epochs.get(worker_id, 0)
                    self.slots[worker_id] = Slot(
                        worker_id, role, epoch=epoch, since_ns=now_ns, due_ns=now_ns
                    )

    def _current(self, worker_id: str, epoch: int) -> Slot | None:
        slot = self.slots.get(worker_id)
        return slot if slot is not None and slot.epoch == epoch else None

    def _enter(self, slot: Slot, phase: Phase, now_ns: int) -> None:
        slot.phase = phase
        slot.since_ns = now_ns
        slot.due_ns = now_ns if phase is Phase.WAITING else _NEVER_NS
        slot.stopping = slot.stopping and phase is Phase.DRAINING

    def _launch(self, slot: Slot, now_ns: int) -> list[Action]:
        slot.epoch += 1
        self._enter(slot, Phase.STARTING, now_ns)
        slot.due_ns = now_ns + START_LIMIT_NS
        move = slot.moving
        slot.moving = False
        slot.failed_starts = 0 if move else slot.failed_starts
        reuse = slot.reusable and not move
        slot.reusable = False
        return [self.describe(slot), Launch(slot.worker_id, slot.role, slot.epoch, reuse, move)]

    def _stop_life(self, slot: Slot) -> list[Action]:
        slot.due_ns = _NEVER_NS
        if slot.stopping:
            return []
        slot.stopping = True
        return [Stop(slot.worker_id, slot.epoch)]

    def _begin_drain(self, slot: Slot, reason: str, then: Phase, now_ns: int) -> list[Action]:
        slot.after_drain = then
        if slot.phase in (Phase.WAITING, Phase.PARKED):
            self._enter(slot, then, now_ns)
            slot.reason = reason
            return self._retire(slot) if slot.leaving else [self.describe(slot)]
        if slot.phase is Phase.DRAINING:
            return []
        loaded = slot.phase is Phase.READY
        slot.reason = reason
        self._enter(slot, Phase.DRAINING, now_ns)
        slot.due_ns = now_ns + DRAIN_LIMIT_NS
        if not loaded:
            return [self.describe(slot), *self._stop_life(slot)]
        return [self.describe(slot), Drain(slot.worker_id, slot.epoch, DRAIN_LIMIT_NS)]

    def _renew(self, slot: Slot, now_ns: int) -> list[Action]:
        slot.backoff_ns = BACKOFF_FIRST_NS
        return self._begin_drain(slot, "restarted by an operator", Phase.WAITING, now_ns)

    def _retire(self, slot: Slot) -> list[Action]:
        """Take a slot off its pool. Should it come back, its lives are counted on."""
        del self.slots[slot.worker_id]
        self._past_epochs[slot.worker_id] = slot.epoch
        gone = Publish(slot.worker_id, slot.role, "dead", slot.epoch, slot.reason)
        return [gone, Remove(slot.worker_id)]

    def _roll(self, now_ns: int) -> list[Action]:
        """Take the next slot of a rolling restart once every other one stands."""
        while self._rolling and self.ready and not self.stopped:
            slot = self.slots.get(self._rolling.pop(0))
            if slot is not None:
                return self._renew(slot, now_ns)
        return []


def _index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
