"""The controller's state machine: which workers to start, drain and stop. Does no I/O.

A pool is a row of slots ``prefill-0, prefill-1 ...``; ``epoch`` numbers a slot's incarnations:

            launch                started                drain             ended
    WAITING ------> STARTING ------------> READY ------> DRAINING ------> WAITING | PARKED | gone
       ^   back-off     |                    |
       +----------------+--------------------+   ended (crash, start limit)

Methods take an event and the time in integer nanoseconds, and return the actions to execute.
Actions and events carry an epoch, so a late event of an earlier incarnation has no effect.
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
MOVED_AFTER_STARTS = 2  # failed ones: the node may be the reason, such as a full disk
_NEVER_NS = 1 << 62


class Phase(enum.Enum):
    """Phase of a slot."""

    WAITING = "waiting"  # no process; one will be started at `due_ns`
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    PARKED = "parked"  # drained by an operator; no process until a restart


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a new incarnation of a slot."""

    worker_id: str
    role: Role
    epoch: int
    reuse: bool = False  # start it in the process of the last incarnation
    move: bool = False  # start it on another node than the last incarnation


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain this incarnation, then report ``drained``."""

    worker_id: str
    epoch: int
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End this incarnation's processes, then report ``ended``."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Write a slot's state to the registry."""

    worker_id: str
    role: Role
    state: WorkerState
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Release the placement of a removed slot."""

    worker_id: str


Action = Launch | Drain | Stop | Publish | Remove


@dataclass(slots=True)
class Slot:
    """Place of one worker in a pool."""

    worker_id: str
    role: Role
    phase: Phase = Phase.WAITING
    epoch: int = 0
    since_ns: int = 0  # when the phase began
    due_ns: int = 0  # WAITING: time of the start; STARTING, DRAINING: time limit
    backoff_ns: int = BACKOFF_FIRST_NS  # for the next crash of a short incarnation
    reason: str = ""
    after_drain: Phase = Phase.WAITING  # where DRAINING leads to
    leaving: bool = False  # being removed from its pool
    stopping: bool = False  # Stop was issued for this incarnation
    reusable: bool = False  # the last incarnation was healthy, and its process still exists
    moving: bool = False  # the next incarnation must start on another node
    failed_starts: int = 0  # in a row


class FleetController:
    """State machine of all slots. Call `tick` for the first actions.

    After ``healthy_after_ns`` an incarnation counts as healthy: its successor starts at once, in
    the same process if it still exists, and the back-off is reset.
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

    # ---- admin commands --------------------------------------------------------------------------

    def resize(self, role: Role, replicas: int, now_ns: int) -> list[Action]:
        """Change a pool's size; the highest numbers are removed first."""
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
        """Drain and stop one worker until it is restarted."""
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
        """Restart slots: all at once, or ``rolling``, one after another, each drained first.

        ``move`` moves each to another node; ``revive`` includes workers that were drained.
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
        """Stop all slots for good."""
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
        """Take over an incarnation that an earlier controller started.

        An incarnation beyond its pool's size gets a slot too; the next `resize` drains it.
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
        """Record an epoch that was used, so that the next incarnation gets a higher one."""
        slot = self.slots.get(worker_id)
        if slot is None:
            self._past_epochs[worker_id] = max(epoch, self._past_epochs.get(worker_id, 0))
        elif slot.phase is Phase.WAITING:
            slot.epoch = max(epoch, slot.epoch)

    def wants(self, worker_id: str, epoch: int) -> bool:
        """Return whether an incarnation that is being placed should still start."""
        slot = self._current(worker_id, epoch)
        return slot is not None and slot.phase is Phase.STARTING and not slot.stopping

    # ---- events --------------------------------------------------------------------------------

    def started(self, worker_id: str, epoch: int, now_ns: int) -> list[Action]:
        """Handle an incarnation that accepts requests."""
        slot = self._current(worker_id, epoch)
        if slot is None:
            return []
        if slot.stopping:  # Stop was issued before the incarnation could receive it
            return [Stop(worker_id, epoch)]
        if slot.phase is not Phase.STARTING:
            return []
        self._enter(slot, Phase.READY, now_ns)
        slot.failed_starts = 0
        slot.reason = ""
        return [self.describe(slot), *self.tick(now_ns)]

    def drained(self, worker_id: str, epoch: int, now_ns: int) -> list[Action]:
        """Handle a draining incarnation that has no requests left."""
        slot = self._current(worker_id, epoch)
        return self._stop_life(slot) if slot and slot.phase is Phase.DRAINING else []

    def ended(
        self, worker_id: str, epoch: int, reason: str, now_ns: int, *, reusable: bool = False
    ) -> list[Action]:
        """Handle the end of an incarnation, expected or not.

        It is ``reusable`` if only the engine is gone, so that its process can host the next one.
        The process must end unless a ``Launch`` with ``reuse`` is returned.
        """
        slot = self._current(worker_id, epoch)
        if slot is None or slot.phase in (Phase.WAITING, Phase.PARKED):
            return []
        if slot.phase is Phase.DRAINING or (slot.stopping and self.stopped):
            self._enter(slot, slot.after_drain, now_ns)
        else:
            uptime_ns = now_ns - slot.since_ns if slot.phase is Phase.READY else 0
            slot.failed_starts += slot.phase is Phase.STARTING
            slot.moving |= slot.failed_starts >= MOVED_AFTER_STARTS
            slot.reason = slot.reason if slot.stopping else reason
            self._enter(slot, Phase.WAITING, now_ns)  # due at once, as after a healthy incarnation
            if uptime_ns >= self._healthy_after_ns:
                slot.backoff_ns = BACKOFF_FIRST_NS
                slot.reusable = reusable
            else:
                slot.due_ns = now_ns + slot.backoff_ns
                slot.backoff_ns = min(2 * slot.backoff_ns, BACKOFF_LIMIT_NS)
        if slot.leaving:
            return [*self._retire(slot), *self.tick(now_ns)]
        return [self.describe(slot), *self.tick(now_ns)]

    def tick(self, now_ns: int) -> list[Action]:
        """Handle the passage of time: start due incarnations, stop those beyond their limit."""
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
        """Return the workers that an operator has drained or is draining."""
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
        """Return the pool sizes that were last requested."""
        return dict(self._wanted)

    @property
    def next_due_ns(self) -> int:
        """Return the time of the next `tick` with something to do."""
        timed = (Phase.WAITING, Phase.STARTING, Phase.DRAINING)
        due = [slot.due_ns for slot in self.slots.values() if slot.phase in timed]
        return min(due, default=_NEVER_NS)

    @property
    def ready(self) -> bool:
        """Return whether every slot that should run is ready."""
        in_use = [slot for slot in self.slots.values() if slot.phase is not Phase.PARKED]
        return all(slot.phase is Phase.READY for slot in in_use)

    @property
    def idle(self) -> bool:
        """Return whether no slot has a process."""
        return all(slot.phase in (Phase.WAITING, Phase.PARKED) for slot in self.slots.values())

    def describe(self, slot: Slot) -> Publish:
        """Return the action that writes a slot's state to the registry."""
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
        """Remove a slot from its pool, and keep its epoch in case the slot returns."""
        del self.slots[slot.worker_id]
        self._past_epochs[slot.worker_id] = slot.epoch
        gone = Publish(slot.worker_id, slot.role, "dead", slot.epoch, slot.reason)
        return [gone, Remove(slot.worker_id)]

    def _roll(self, now_ns: int) -> list[Action]:
        """Restart the next slot of a rolling restart once all others are ready."""
        while self._rolling and self.ready and not self.stopped:
            slot = self.slots.get(self._rolling.pop(0))
            if slot is not None:
                return self._renew(slot, now_ns)
        return []


def _index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
