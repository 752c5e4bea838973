"""Runs the planner of roles in the controller.

Every two seconds it reads the demand of all routers and the last ping of each worker. In ``auto``
the planner's turns are made; otherwise it only decides, and `baton plan` shows what it would do.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from baton.config.clients import SloConfig
from baton.planner.planner import Planner
from baton.planner.state import Decision, Limits, Nothing, Turn, WorkerState
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import RouterDemand, RouterDemands
from baton.registry.types import Role

_LOG = logging.getLogger("fleet.pools.planner")

PLAN_EVERY_S = 2.0
_KEPT = 200  # decisions

NO_LIMITS = "the fleet file has no `slo`: the planner needs its limits"


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and what became of it."""

    at: float  # Unix time
    decision: Decision
    done: bool = False
    refused: str = ""  # why a turn was not made, although it was to be


class RolePlanning:
    """Planner of one fleet, with its inputs and its last decisions.

    Args:
        slo: Latency limits; None: there is nothing to plan for.
        workers: Returns the ready workers.
        turn: Gives a worker another role; returns why it cannot, or "".
    """

    def __init__(
        self,
        slo: SloConfig | None,
        demands: RouterDemands,
        workers: Callable[[], Sequence[WorkerState]],
        turn: Callable[[str, Role], Awaitable[str]],
    ) -> None:
        self.auto = False
        self.reason = ""  # of the last turn
        self._slo = slo
        self._planner = None if slo is None else Planner(Limits(ttft_s=slo.ttft_s, itl_s=slo.itl_s))
        self._demands = demands
        self._workers = workers
        self._turn = turn
        self._beats: dict[str, int] = {}
        self._decided: deque[Decided] = deque(maxlen=_KEPT)

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
            "decisions": [msgspec.to_builtins(one) for one in reversed(self._decided)],
        }

    async def run(self) -> None:
        """Plan until cancelled."""
        while self._planner is not None:
            await self.plan(self._planner)
            await asyncio.sleep(PLAN_EVERY_S)

    async def plan(self, planner: Planner) -> None:
        """Observe and decide once; in ``auto`` do what was decided."""
        try:
            found = await self._demands.read()
        except RegistryUnavailableError:
            return  # the demand is unknown: the roles stay
        demands = {name: demand.work for name, demand in self._reporting(found).items()}
        now_ns = time.monotonic_ns()
        planner.observe(demands, self._workers(), now_ns)
        decision = planner.decide(now_ns)
        refused = ""
        is_turn = isinstance(decision, Turn)
        if isinstance(decision, Turn) and self.auto:
            self.reason = decision.reason
            refused = await self._turn(decision.worker_id, decision.role)
            what = f"not made: {refused}" if refused else "made"
            figures = msgspec.json.encode(decision.figures).decode()
            _LOG.info(
                "turn of worker=%s to role=%s %s; %s %s",
                decision.worker_id,
                decision.role,
                what,
                decision.reason,
                figures,
            )
        done = is_turn and self.auto and not refused
        self._keep(Decided(at=time.time(), decision=decision, done=done, refused=refused))

    def _reporting(self, found: dict[str, RouterDemand]) -> dict[str, RouterDemand]:
        """Return the demand of routers that have reported since the last look."""
        before = self._beats
        self._beats = {name: demand.beat for name, demand in found.items()}
        return {name: one for name, one in found.items() if before.get(name, -1) != one.beat}

    def _keep(self, decided: Decided) -> None:
        """Keep a decision; one that repeats the last replaces it, since its figures are newer."""
        last = self._decided[-1].decision if self._decided else None
        decision = decided.decision
        same = isinstance(last, Nothing) and isinstance(decision, Nothing)
        if same and _kind(last) == _kind(decision):
            self._decided.pop()
        self._decided.append(decided)


def _kind(decision: Decision | None) -> str:
    """Return a reason without its figures."""
    reason = "" if decision is None else decision.reason
    return "".join(letter for letter in reason if not (letter.isdigit() or letter == "."))
