"""Runs the planner in the controller.

Every two seconds it reads the demand of all routers and the last ping of each worker. In ``auto``
its turns and sizes are applied; in ``hold`` it only decides, and `baton plan` shows what it would
do. A fleet without workers starts in both when a request waits, unless it is asleep.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from baton.config.clients import SloConfig
from baton.planner.planner import Planner, best_split
from baton.planner.sizes import SizePlanner
from baton.planner.state import Decision, Nothing, Resize, RoleChange, WorkerState
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemand, RouterDemands, Sleep
from baton.registry.types import Role
from baton.types.slo import Slo

_LOG = logging.getLogger("fleet.pools.planner")

PLAN_EVERY_S = 2.0
WAKE_EVERY_S = 0.2  # between looks at the demand of a fleet without workers
_KEPT = 200  # decisions

NO_LIMITS = "the fleet file has no `slo`: the planner needs its limits"


class AppliedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and what became of it."""

    at: float  # Unix time
    decision: Decision
    done: bool = False
    refused: str = ""  # why it was not applied, although it was to be


class PlannedFleet(Protocol):
    """Workers that the planner observes, and the changes that it makes."""

    @property
    def sizes(self) -> Mapping[Role, int]:
        """Return the pool sizes that were asked for last."""

    def workers(self) -> Sequence[WorkerState]:
        """Return the ready workers."""

    async def change_role(self, worker_id: str, role: Role, reason: str) -> str:
        """Give a worker another role; return why it cannot have it, or ""."""

    async def resize(self, sizes: Mapping[Role, int], reason: str) -> str:
        """Change the pool sizes; return why that is not possible, or ""."""


class RolePlanning:
    """Planner of one fleet, with its inputs and its last decisions.

    Args:
        slo: Latency limits; None: there is nothing to plan for.
        size_planner: Planner of the sizes, in a fleet with bounds.
    """

    def __init__(
        self, slo: SloConfig | None, demands: RouterDemands, size_planner: SizePlanner | None = None
    ) -> None:
        self.auto = size_planner is not None
        self.asleep: Sleep = ""
        self._slo = slo
        self._planner: Planner | None = None
        if slo is not None:
            limits = Slo(ttft_s=slo.ttft_s, itl_s=slo.itl_s)
            self._planner = Planner(limits, size_planner)
        self._demands = demands
        self._beats: dict[str, int] = {}
        self._decided: deque[AppliedDecision] = deque(maxlen=_KEPT)

    @property
    def possible(self) -> bool:
        """True if the fleet has latency limits to plan for."""
        return self._planner is not None

    def describe(self) -> dict[str, Any]:
        """Return the mode, the limits and the last decisions as plain data, the newest first."""
        return {
            "mode": "auto" if self.auto else "hold",
            "slo": None if self._slo is None else self._slo.model_dump(),
            "reason": "" if self.possible else NO_LIMITS,
            "decisions": [msgspec.to_builtins(decided) for decided in reversed(self._decided)],
        }

    async def run(self, fleet: PlannedFleet) -> None:
        """Plan until cancelled."""
        while self._planner is not None:
            await self.plan(self._planner, fleet)
            await asyncio.sleep(PLAN_EVERY_S if any(fleet.sizes.values()) else WAKE_EVERY_S)

    async def plan(self, planner: Planner, fleet: PlannedFleet) -> None:
        """Observe and decide once; apply the decision in ``auto``, or if no worker is there."""
        try:
            reported = await self._demands.read()
        except RegistryUnavailableError:
            return  # the demand is unknown: the roles stay
        demands = {name: demand.work for name, demand in self._reporting(reported).items()}
        now_ns = time.monotonic_ns()
        planner.observe(demands, fleet.workers(), now_ns)
        wanted = fleet.sizes
        decision = planner.decide(now_ns, wanted)
        await self.report(plan_of(decision, wanted))
        refused = ""
        acts = not isinstance(decision, Nothing) and (self.auto or not any(wanted.values()))
        acts = acts and not self.asleep
        if acts:
            refused = await self._apply(decision, fleet)
        done = acts and not refused
        self._keep(AppliedDecision(at=time.time(), decision=decision, done=done, refused=refused))

    async def report(self, plan: PlannedSizes) -> None:
        """Report to the routers, which serve the fleet's metrics."""
        with contextlib.suppress(RegistryUnavailableError):
            await self._demands.report_plan(msgspec.structs.replace(plan, asleep=self.asleep))

    async def _apply(self, decision: Decision, fleet: PlannedFleet) -> str:
        """Apply a decision; return why that is not possible, or ""."""
        match decision:
            case RoleChange():
                refused = await fleet.change_role(
                    decision.worker_id, decision.role, decision.reason
                )
                what = f"turn of worker={decision.worker_id} to role={decision.role}"
            case Resize():
                refused = await fleet.resize(decision.sizes, decision.reason)
                what = f"change of sizes to prefill={decision.prefill} decode={decision.decode}"
            case Nothing():
                return ""
        outcome = f"not made: {refused}" if refused else "made"
        figures = msgspec.json.encode(decision.figures).decode()
        _LOG.info("%s %s; %s %s", what, outcome, decision.reason, figures)
        return refused

    def _reporting(self, reported: dict[str, RouterDemand]) -> dict[str, RouterDemand]:
        """Return the demand of routers that have reported since the last look."""
        before = self._beats
        self._beats = {name: demand.beat for name, demand in reported.items()}
        return {n: demand for n, demand in reported.items() if before.get(n, -1) != demand.beat}

    def _keep(self, decided: AppliedDecision) -> None:
        """Keep a decision; one that repeats the last replaces it, since its figures are newer."""
        last = self._decided[-1].decision if self._decided else None
        decision = decided.decision
        same = isinstance(last, Nothing) and isinstance(decision, Nothing)
        if same and _kind(last) == _kind(decision):
            self._decided.pop()
        self._decided.append(decided)


def plan_of(decision: Decision, sizes: Mapping[Role, int]) -> PlannedSizes:
    """Return the sizes that a decision leads to from these, and the load at the best split."""
    wanted = dict(sizes)
    match decision:
        case Resize():
            wanted = decision.sizes
        case RoleChange():
            other: Role = "decode" if decision.role == "prefill" else "prefill"
            wanted[decision.role] = wanted.get(decision.role, 0) + 1
            wanted[other] = wanted.get(other, 0) - 1
    figures = decision.figures
    judged = figures is not None and figures.prefill + figures.decode >= 2
    return PlannedSizes(
        prefill=wanted.get("prefill", 0),
        decode=wanted.get("decode", 0),
        load=best_split(figures)[1] if figures is not None and judged else 0.0,
    )


def _kind(decision: Decision | None) -> str:
    """Return a reason without its figures."""
    reason = "" if decision is None else decision.reason
    return "".join(letter for letter in reason if not (letter.isdigit() or letter == "."))
