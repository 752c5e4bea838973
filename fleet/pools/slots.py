"""Slots of a fleet, and the actions of its controller."""

import enum
from dataclasses import dataclass

from baton.registry.types import Intent, Role, WorkerRecord, WorkerState, number_of

SECOND_NS = 1_000_000_000
BACKOFF_FIRST_NS = SECOND_NS // 2


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
    turn: int = 0  # number of the turn that gave the slot its role
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
class ChangeRole:
    """Publish all slots' roles, and send this running incarnation its new one."""

    worker_id: str
    role: Role
    epoch: int
    turn: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Release the placement of a removed slot."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class LivingWorker:
    """Living incarnation that an earlier controller started.

    ``role`` and ``turn`` are those that it reports; None: it reported no role. A ``silent`` one has
    reported nothing, and its actor may be named after an earlier one.
    """

    worker_id: str
    epoch: int
    ready: bool
    role: Role | None = None
    turn: int = 0
    silent: bool = False


Action = Launch | Drain | Stop | WorkerRecord | ChangeRole | Remove
"""Action of the controller; a record is to be written to the registry."""


@dataclass(slots=True)
class Slot:
    """Place of one worker in the fleet."""

    worker_id: str
    role: Role
    phase: Phase = Phase.WAITING
    epoch: int = 0
    used: int = 0  # the highest epoch that was ever used, as far as is known
    turn: int = 0  # number of the turn that gave it its role; 0: it never turned
    told: int = 0  # the turn that the present incarnation knows
    since_ns: int = 0  # when the phase began
    due_ns: int = 0  # WAITING: time of the start; STARTING, DRAINING: time limit
    backoff_ns: int = BACKOFF_FIRST_NS  # for the next crash of a short incarnation
    reason: str = ""
    after_drain: Phase = Phase.WAITING  # where DRAINING leads to
    leaving: bool = False  # being removed from the fleet
    stopping: bool = False  # Stop was issued for this incarnation
    reusable: bool = False  # the last incarnation was healthy, and its process still exists
    moving: bool = False  # the next incarnation must start on another node
    failed_starts: int = 0  # in a row

    @property
    def number(self) -> int:
        """Number in the worker's id."""
        return number_of(self.worker_id)

    @property
    def has_process(self) -> bool:
        """True while an incarnation starts, runs or drains."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING)

    @property
    def ready(self) -> bool:
        """True if it accepts requests."""
        return self.phase is Phase.READY

    @property
    def intent(self) -> Intent:
        """Purpose of the slot after its present phase."""
        if self.leaving:
            return "leave"
        drained = self.phase in (Phase.PARKED, Phase.DRAINING)
        return "park" if drained and self.after_drain is Phase.PARKED else "serve"

    @property
    def down(self) -> bool:
        """True if an operator has drained it, or is draining it."""
        return self.intent == "park"

    def describe(self) -> WorkerRecord:
        """Return the slot's record in the registry."""
        states: dict[Phase, WorkerState] = {
            Phase.WAITING: "dead" if self.epoch else "starting",
            Phase.STARTING: "starting",
            Phase.READY: "ready",
            Phase.DRAINING: "draining",
            Phase.PARKED: "dead",
        }
        return self.published(states[self.phase])

    def published(self, state: WorkerState) -> WorkerRecord:
        """Return the slot's record with this state."""
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            state=state,
            epoch=self.epoch,
            reason=self.reason,
            turn=self.turn,
            intent=self.intent,
        )
