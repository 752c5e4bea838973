"""Task of a router that follows the gates of canaries and shadows, and takes these out."""

import asyncio
import logging
from time import monotonic_ns

from baton.registry.lanes.gates import GateSums, SharedGates
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import ModelNotFoundError
from router.frontend.api.parts import RouterParts
from router.frontend.gates.golden import GoldenRunner, golden_of
from router.routing.lanes.gate import Gate
from router.routing.lanes.routes import RouteChangeError, route_entry, thrown_out

_LOG = logging.getLogger(__name__)

PERIOD_S = 0.25


class GateWatch:
    """Exchanges evidence with the other routers four times a second.

    One router, which has a lease in Redis, runs the golden prompts of a canary. Each router takes a
    canary out as soon as it has a reason.
    """

    def __init__(self, router: RouterParts, shared: SharedGates) -> None:
        self._router = router
        self._shared = shared
        self._golden = GoldenRunner(router)
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Start to follow the gates of canaries."""
        self._router.tasks.keep(self._follow, "gates")

    async def _follow(self) -> None:
        gates = self._router.gates
        while True:
            gates.follow(self._router.routes.table)
            for gate in gates:
                try:
                    await self._exchange(gate)
                except RegistryUnavailableError:
                    continue  # the registry counts it
            await asyncio.sleep(PERIOD_S)

    async def _exchange(self, gate: Gate) -> None:
        fresh = gate.take()
        since_ms = gate.entry.since_ms
        router_id = self._router.gateway.router_id
        try:
            sums = await self._shared.exchange(router_id, gate.name, since_ms, fresh)
        except RegistryUnavailableError:
            gate.give_back(fresh)
            raise
        reason = gate.judge(sums.evidence)
        self._run_golden(gate, sums)
        if reason:
            await self._take_out(gate)

    def _run_golden(self, gate: Gate, sums: GateSums) -> None:
        if not sums.is_runner:
            gate.last_round = sums.last_round
            return
        task = self._running.get(gate.name)
        if task is not None and not task.done():
            return
        try:
            has_golden = bool(golden_of(self._router, gate.entry.candidate))
        except ModelNotFoundError:  # an adapter that was unloaded
            return
        if has_golden and gate.round_due(monotonic_ns()):
            self._running[gate.name] = self._router.tasks.spawn(self._round(gate), "golden prompts")

    async def _round(self, gate: Gate) -> None:
        found = await self._golden.run(gate.entry.candidate)
        gate.on_round(found)  # the next exchange acts on a reason
        try:
            await self._shared.put_round(gate.name, gate.entry.since_ms, found)
        except RegistryUnavailableError as error:
            _LOG.warning("cannot write the result of golden prompts: %s", error)

    async def _take_out(self, gate: Gate) -> None:
        """End a canary or shadow at all routers. The next exchange tries again if this fails."""
        routes = self._router.routes
        name = gate.name
        tried = gate.entry
        kind = "canary" if tried.canary else "shadow"
        model = tried.candidate
        try:
            before, after = await routes.change(
                lambda table: thrown_out(table, name, tried, gate.reason)
            )
        except RouteChangeError:
            return  # another router or an operator was faster
        except RegistryUnavailableError as error:
            _LOG.error("cannot roll back name=%s %s=%s: %s", name, kind, model, error)
            return
        self._router.gates.follow(after)
        self._router.metrics.inc("baton_model_rollbacks", model=model)
        _LOG.warning("rolled back name=%s %s=%s: %s", name, kind, model, gate.reason)
        if self._router.audit is not None:
            await self._router.audit.record(
                "models rollback",
                name,
                who=f"router {self._router.gateway.router_id}",
                before=route_entry(before.names.get(name)),
                after=route_entry(after.names.get(name)),
            )
