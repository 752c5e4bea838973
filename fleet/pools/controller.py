"""The controller's state machine: which workers to start, drain and stop. Does no I/O.

The fleet is a row of slots ``worker-0, worker-1 ...``; ``epoch`` numbers a slot's incarnations:

            launch                started                drain             ended
    WAITING ------> STARTING ------------> READY ------> DRAINING ------> WAITING | PARKED | gone
       ^   back-off     |                    |
       +----------------+--------------------+   ended (crash, start limit)

A slot's role is a label, which can change in every phase: a turn stops no process. Turns have
numbers, so that readers of two records know the later one.

Methods take an event and the time in integer nanoseconds, and return the actions to execute.
Actions and events carry an epoch, so a late event of an earlier incarnation has no effect.
"""

from collections.abc import Mapping

from baton.registry.types import Role, worker_name
from fleet.pools.balance import LeavingOrder, MayTurn, always, balance, same
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
    Slot,
    Stop,
)

BACKOFF_LIMIT_NS = 30 * SECOND_NS
HEALTHY_AFTER_NS = 30 * SECOND_NS
START_LIMIT_NS = 300 * SECOND_NS
DRAIN_LIMIT_NS = 30 * SECOND_NS
STOP_AGAIN_NS = 10 * SECOND_NS  # a Stop may get lost; it is repeated until the end is reported
KNOWN_AFTER_NS = 2 * SECOND_NS  # all routers use an incarnation that has been ready for so long
MOVED_AFTER_STARTS = 2  # failed ones: the node may be the reason, such as a full disk
_NEVER_NS = 1 << 62


class FleetController:
    """State machine of all slots. Call `tick` for the first actions.

    After ``healthy_after_ns`` an incarnation counts as healthy: its successor starts at once, in
    the same process if it still exists, and the back-off is reset. It may wait for room for
    ``place_limit_ns``, and then take `START_LIMIT_NS` to start.
    """

    def __init__(
        self,
        pools: Mapping[Role, int],
        now_ns: int,
        healthy_after_ns: int = HEALTHY_AFTER_NS,
        place_limit_ns: int = START_LIMIT_NS,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self.slots: dict[str, Slot] = {}
        self.stopped = False
        self._healthy_after_ns = healthy_after_ns
        self._place_limit_ns = place_limit_ns
        self._rolling: list[str] = []
        self._wanted = dict(pools)
        self._past: dict[str, Slot] = {}  # removed, or known to the registry only
        self._turns = 0  # the last turn's number
        for role, replicas in self._wanted.items():
            for _ in range(replicas):
                self._add(role, now_ns)

    def resize(
        self,
        sizes: Mapping[Role, int],
        now_ns: int,
        may_turn: MayTurn = always,
        leaving_order: LeavingOrder = same,
    ) -> list[Action]:
        """Change the pools' sizes: turn surplus workers first, then drain or start the rest."""
        self._wanted |= sizes
        return [*self._balance(now_ns, may_turn, leaving_order), *self.tick(now_ns)]

    def settle(self, now_ns: int, *, add: bool = True) -> None:
        """Reconcile the slots without a process with the adopted ones, which are left alone.

        Without ``add`` a `resize` follows, which may turn an adopted worker instead.
        """
        idle = {slot.worker_id for slot in self.slots.values() if not slot.has_process}
        self._balance(now_ns, lambda worker_id, _: worker_id in idle, keep=True, add=add)

    def change_role(self, worker_id: str, role: Role, now_ns: int) -> list[Action]:
        """Give a worker another role, and change the pools' sizes accordingly.

        Its running requests and its cache stay.
        """
        slot = self.slots[worker_id]
        if slot.role == role:
            return []
        if not slot.leaving:
            self._wanted[slot.role] -= 1
            self._wanted[role] = self._wanted.get(role, 0) + 1
        return [*self._turn(slot, role), *self.tick(now_ns)]

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
                actions += self._stop_life(slot, now_ns)
        return actions + self.tick(now_ns)

    def stop(self, now_ns: int) -> list[Action]:
        """Stop all slots for good."""
        self.stopped = True
        self._rolling.clear()
        actions: list[Action] = []
        for slot in self.slots.values():
            if slot.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING):
                slot.after_drain = Phase.PARKED
                actions += self._stop_life(slot, now_ns)
            else:
                self._enter(slot, Phase.PARKED, now_ns)
        return actions

    def adopt(self, living: LivingWorker, now_ns: int) -> None:
        """Take over a living incarnation that an earlier controller started.

        If it reports no role, the registry's counts. A silent one is taken for the latest in the
        registry, until `correct`. An incarnation beyond its pool's size gets a slot too; the next
        `resize` drains it.
        """
        worker_id = living.worker_id
        slot = self.slots.get(worker_id)
        if slot is None:
            past = self._past.get(worker_id, Slot(worker_id, "decode"))
            slot = Slot(worker_id, past.role, epoch=past.epoch, turn=past.turn)
            self.slots[worker_id] = slot
        if slot.phase is not Phase.WAITING:
            return
        slot.used = max(living.epoch, slot.epoch)
        slot.epoch = slot.used if living.silent else living.epoch
        slot.told = living.turn
        if living.role is not None and living.turn >= slot.turn:
            slot.role = living.role
            slot.turn = living.turn
            self._turns = max(living.turn, self._turns)
        self._enter(slot, Phase.READY if living.ready else Phase.STARTING, now_ns)
        if not living.ready:
            slot.due_ns = now_ns + START_LIMIT_NS

    def correct(self, worker_id: str, epoch: int, reported: int) -> list[Action]:
        """Handle the epoch that an adopted incarnation reports, if it is another one."""
        slot = self._current(worker_id, epoch)
        if slot is None or not slot.has_process or reported == epoch:
            return []
        slot.used = max(slot.used, reported)
        slot.epoch = reported
        return [slot.describe()]

    def note_epoch(self, worker_id: str, epoch: int) -> None:
        """Record an epoch that was used, so that the next incarnation gets a higher one."""
        slot = self._known(worker_id, "decode")
        if slot.phase is Phase.WAITING:
            slot.epoch = max(epoch, slot.epoch)

    def note_record(self, worker_id: str, epoch: int, role: Role, turn: int) -> None:
        """Record the registry's data on a slot: its last epoch, its role and its turn."""
        self._turns = max(turn, self._turns)
        slot = self._known(worker_id, role)
        self.note_epoch(worker_id, epoch)
        is_past = worker_id not in self.slots
        if slot.phase is Phase.WAITING and (turn > slot.turn or (is_past and turn == slot.turn)):
            slot.role = role
            slot.turn = turn

    def _known(self, worker_id: str, role: Role) -> Slot:
        """Return a slot, or what is known of a removed one; ``role`` is that of an unknown one."""
        if worker_id in self.slots:
            return self.slots[worker_id]
        return self._past.setdefault(worker_id, Slot(worker_id, role))

    def wants(self, worker_id: str, epoch: int) -> bool:
        """Return whether an incarnation that is being placed should still start."""
        slot = self._current(worker_id, epoch)
        return slot is not None and slot.phase is Phase.STARTING and not slot.stopping

    def placed(self, worker_id: str, epoch: int, now_ns: int) -> None:
        """Note that an incarnation has room, and starts from now on."""
        slot = self._current(worker_id, epoch)
        if slot is not None and slot.phase is Phase.STARTING and not slot.stopping:
            slot.due_ns = now_ns + START_LIMIT_NS

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
        return [slot.describe(), *self._tell(slot), *self.tick(now_ns)]

    def drained(self, worker_id: str, epoch: int, now_ns: int) -> list[Action]:
        """Handle a draining incarnation that has no requests left."""
        slot = self._current(worker_id, epoch)
        return self._stop_life(slot, now_ns) if slot and slot.phase is Phase.DRAINING else []

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
        return [slot.describe(), *self.tick(now_ns)]

    def tick(self, now_ns: int) -> list[Action]:
        """Handle the passage of time: start due incarnations, stop those beyond their limit."""
        actions: list[Action] = []
        for slot in list(self.slots.values()):
            if slot.due_ns > now_ns:
                continue
            if slot.phase is Phase.WAITING and not self.stopped:
                actions += self._launch(slot, now_ns)
            elif slot.has_process:
                if slot.phase is Phase.STARTING and not slot.stopping:
                    slot.reason = f"did not start within {(now_ns - slot.since_ns) // SECOND_NS} s"
                actions += self._stop_life(slot, now_ns)
        return actions + self._roll(now_ns)

    @property
    def drained_workers(self) -> tuple[str, ...]:
        """Return the workers that an operator has drained or is draining."""
        if self.stopped:
            return ()
        return tuple(slot.worker_id for slot in self.slots.values() if slot.down)

    @property
    def rolling(self) -> tuple[str, ...]:
        """Return the workers whose turn of a rolling restart is still to come."""
        return tuple(self._rolling)

    @property
    def wanted(self) -> dict[Role, int]:
        """Return the pool sizes that were last requested."""
        return dict(self._wanted)

    @property
    def next_due_ns(self) -> int:
        """Return the time of the next `tick` with something to do."""
        return min((slot.due_ns for slot in self.slots.values()), default=_NEVER_NS)

    @property
    def ready(self) -> bool:
        """Return whether every slot that should run is ready."""
        in_use = [slot for slot in self.slots.values() if slot.phase is not Phase.PARKED]
        return all(slot.phase is Phase.READY for slot in in_use)

    @property
    def idle(self) -> bool:
        """Return whether no slot has a process."""
        return all(slot.phase in (Phase.WAITING, Phase.PARKED) for slot in self.slots.values())

    def _add(self, role: Role, now_ns: int) -> None:
        number = 0
        while (worker_id := worker_name(number, self._prefix)) in self.slots:
            number += 1
        past = self._past.get(worker_id, Slot(worker_id, role))
        slot = Slot(worker_id, role, epoch=past.epoch, since_ns=now_ns, due_ns=now_ns)
        if past.turn and past.role != role:
            self._relabel(slot, role)
        self.slots[worker_id] = slot

    def _balance(
        self,
        now_ns: int,
        may_turn: MayTurn,
        leaving_order: LeavingOrder = same,
        *,
        keep: bool = False,
        add: bool = True,
    ) -> list[Action]:
        """Fit the slots to the sizes; ``keep``: drain no worker that has a process."""
        plan = balance(self.slots.values(), self._wanted, may_turn, leaving_order)
        actions: list[Action] = []
        for worker_id in plan.returning:
            slot = self.slots[worker_id]
            slot.leaving = False
            slot.after_drain = Phase.WAITING
        for worker_id, role in plan.turned:
            actions += self._turn(self.slots[worker_id], role)
        for worker_id in plan.removed:
            slot = self.slots[worker_id]
            if not (keep and slot.has_process):
                slot.leaving = True
                actions += self._begin_drain(slot, "scale-in", Phase.PARKED, now_ns)
        for role in plan.added if add else ():
            self._add(role, now_ns)
        return actions

    def _turn(self, slot: Slot, role: Role) -> list[Action]:
        self._relabel(slot, role)
        return self._tell(slot) or [slot.describe()]

    def _relabel(self, slot: Slot, role: Role) -> None:
        self._turns += 1
        slot.turn = self._turns
        slot.role = role

    def _tell(self, slot: Slot) -> list[Action]:
        """Return the action that sends a ready incarnation a turn, unless it was sent before."""
        if slot.phase is not Phase.READY or slot.told == slot.turn:
            return []
        slot.told = slot.turn
        return [ChangeRole(slot.worker_id, slot.role, slot.epoch, slot.turn)]

    def _current(self, worker_id: str, epoch: int) -> Slot | None:
        slot = self.slots.get(worker_id)
        return slot if slot is not None and slot.epoch == epoch else None

    def _enter(self, slot: Slot, phase: Phase, now_ns: int) -> None:
        slot.phase = phase
        slot.since_ns = now_ns
        slot.due_ns = now_ns if phase is Phase.WAITING else _NEVER_NS
        slot.stopping = slot.stopping and phase is Phase.DRAINING

    def _launch(self, slot: Slot, now_ns: int) -> list[Action]:
        slot.epoch = max(slot.epoch, slot.used) + 1
        self._enter(slot, Phase.STARTING, now_ns)
        slot.due_ns = now_ns + self._place_limit_ns
        move = slot.moving
        slot.moving = False
        slot.failed_starts = 0 if move else slot.failed_starts
        reuse = slot.reusable and not move
        slot.reusable = False
        slot.told = slot.turn
        launch = Launch(slot.worker_id, slot.role, slot.epoch, slot.turn, reuse, move)
        return [slot.describe(), launch]

    def _stop_life(self, slot: Slot, now_ns: int) -> list[Action]:
        if slot.stopping and slot.due_ns > now_ns:
            return []
        slot.stopping = True
        slot.due_ns = now_ns + STOP_AGAIN_NS
        return [Stop(slot.worker_id, slot.epoch)]

    def _begin_drain(self, slot: Slot, reason: str, then: Phase, now_ns: int) -> list[Action]:
        slot.after_drain = then
        if slot.phase in (Phase.WAITING, Phase.PARKED):
            self._enter(slot, then, now_ns)
            slot.reason = reason
            return self._retire(slot) if slot.leaving else [slot.describe()]
        if slot.phase is Phase.DRAINING:
            return []
        loaded = slot.phase is Phase.READY
        slot.reason = reason
        self._enter(slot, Phase.DRAINING, now_ns)
        if not loaded:
            slot.due_ns = now_ns + STOP_AGAIN_NS  # if it is stopping already
            return [slot.describe(), *self._stop_life(slot, now_ns)]
        slot.due_ns = now_ns + DRAIN_LIMIT_NS
        return [slot.describe(), Drain(slot.worker_id, slot.epoch, DRAIN_LIMIT_NS)]

    def _renew(self, slot: Slot, now_ns: int) -> list[Action]:
        slot.backoff_ns = BACKOFF_FIRST_NS
        return self._begin_drain(slot, "restarted by an operator", Phase.WAITING, now_ns)

    def _retire(self, slot: Slot) -> list[Action]:
        """Remove a slot, and keep its epoch and its turn, which must not be used twice."""
        del self.slots[slot.worker_id]
        used = max(slot.epoch, slot.used)
        self._past[slot.worker_id] = Slot(slot.worker_id, slot.role, epoch=used, turn=slot.turn)
        return [slot.published("dead"), Remove(slot.worker_id)]

    def _roll(self, now_ns: int) -> list[Action]:
        """Restart the next slot of a rolling restart once routers use all others."""
        begun = (slot.since_ns for slot in self.slots.values() if slot.phase is Phase.READY)
        known = max(begun, default=-KNOWN_AFTER_NS) + KNOWN_AFTER_NS <= now_ns
        while self._rolling and self.ready and known and not self.stopped:
            slot = self.slots.get(self._rolling.pop(0))
            if slot is not None:
                return self._renew(slot, now_ns)
        return []
