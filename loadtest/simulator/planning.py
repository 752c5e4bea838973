"""The planner in a simulation: the real machine, every two seconds of virtual time."""

from collections.abc import Callable, Mapping

import msgspec

from baton.planner.planner import Planner
from baton.planner.sizes import SizePlanner
from baton.planner.state import Decision, Resize, RoleChange, WorkerState, state_of
from baton.registry.types import Role
from baton.types.slo import Slo
from loadtest.simulator.clock import VirtualClock
from loadtest.simulator.router import SimulatedRouter
from loadtest.simulator.table import SimulatedTable
from router.routing.workers.slot import WorkerSlot

PLAN_NS = 2_000_000_000


class TimedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and when it was taken."""

    at_s: float
    decision: Decision


class SimulatedPlanner:
    """Observes and decides while ``is_busy``; ``decisions`` has every one."""

    def __init__(
        self,
        slo: Slo,
        clock: VirtualClock,
        table: SimulatedTable,
        router: SimulatedRouter,
        max_streams: int,
        turn: Callable[[str, Role], None],
        sizes: Callable[[], Mapping[Role, int]],
        resize: Callable[[Mapping[Role, int]], None],
        is_busy: Callable[[], bool],
        size_planner: SizePlanner | None = None,
    ) -> None:
        self.decisions: list[TimedDecision] = []
        self._planner = Planner(slo, size_planner)
        self._sizes = sizes
        self._resize = resize
        self._clock = clock
        self._table = table
        self._router = router
        self._max_streams = max_streams
        self._turn = turn
        self._is_busy = is_busy

    def start(self) -> None:
        """Plan from now on."""
        self._observe()
        self._clock.after(PLAN_NS, self._plan)

    def _observe(self) -> None:
        workers = [self._state(slot) for slot in self._table.usable]
        demands = {"router": self._router.work.demand()}
        self._planner.observe(demands, workers, self._clock.now_ns)

    def _plan(self) -> None:
        if not self._is_busy():
            return
        now_ns = self._clock.now_ns
        self._observe()
        decision = self._planner.decide(now_ns, self._sizes())
        self.decisions.append(TimedDecision(at_s=now_ns / 1e9, decision=decision))
        if isinstance(decision, RoleChange):
            self._turn(decision.worker_id, decision.role)
        elif isinstance(decision, Resize):
            self._resize(decision.sizes)
        self._clock.after(PLAN_NS, self._plan)

    def _state(self, slot: WorkerSlot) -> WorkerState:
        status = self._table.worker(slot.worker_id).status()
        return state_of(slot.worker_id, slot.role, status, self._max_streams)
