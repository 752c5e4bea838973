"""The planner in a simulation: the real machine, every two seconds of virtual time."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from baton.planner.planner import Planner
from baton.planner.state import Decision, Resize, RoleChange, WorkerState, state_of
from baton.registry.types import Role
from loadtest.simulator.network import VirtualClock
from loadtest.simulator.router import SimulatedRouter
from loadtest.simulator.table import SimulatedTable
from router.routing.workers.slot import WorkerSlot

PLAN_NS = 2_000_000_000


class TimedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and when it was taken."""

    at_s: float
    decision: Decision


class PlannedSimulation(Protocol):
    """Simulation that the planner observes and changes."""

    clock: VirtualClock
    router: SimulatedRouter
    wanted: dict[Role, int]

    @property
    def is_busy(self) -> bool:
        """Return whether a request has not ended."""

    def change_role(self, worker_id: str, role: Role) -> None:
        """Give a worker another role."""

    def resize(self, sizes: Mapping[Role, int]) -> None:
        """Start workers, or let some leave."""


class SimulatedPlanner:
    """Observes and decides while the simulation is busy; ``decisions`` has every one."""

    def __init__(
        self,
        planner: Planner,
        simulation: PlannedSimulation,
        table: SimulatedTable,
        max_streams: int,
    ) -> None:
        self.decisions: list[TimedDecision] = []
        self._planner = planner
        self._simulation = simulation
        self._clock = simulation.clock
        self._table = table
        self._max_streams = max_streams

    def start(self) -> None:
        """Plan from now on."""
        self._observe()
        self._clock.after(PLAN_NS, self._plan)

    def _observe(self) -> None:
        workers = [self._state(slot) for slot in self._table.usable]
        demands = {"router": self._simulation.router.work.demand()}
        self._planner.observe(demands, workers, self._clock.now_ns)

    def _plan(self) -> None:
        if not self._simulation.is_busy:
            return
        now_ns = self._clock.now_ns
        self._observe()
        decision = self._planner.decide(now_ns, self._simulation.wanted)
        self.decisions.append(TimedDecision(at_s=now_ns / 1e9, decision=decision))
        if isinstance(decision, RoleChange):
            self._simulation.change_role(decision.worker_id, decision.role)
        elif isinstance(decision, Resize):
            self._simulation.resize(decision.sizes)
        self._clock.after(PLAN_NS, self._plan)

    def _state(self, slot: WorkerSlot) -> WorkerState:
        status = self._table.worker(slot.worker_id).status()
        return state_of(slot.worker_id, slot.role, status, self._max_streams)
