"""Task of a router that follows the gates of canaries and shadows, and takes these out."""

import asyncio
import logging
from time import monotonic_ns

from baton.registry.gates import SharedGates
from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.audit.chain import Entry
from baton.types.errors import ModelNotFoundError
from baton.types.routes import NameRoute
from baton.types.versioned import TableChangeError
from router.frontend.operators.gates.golden import GoldenRunner, golden_of
from router.lanes.gate import Gate
from router.lanes.routes import route_entry, thrown_out
from router.process import Process

_LOG = logging.getLogger(__name__)

PERIOD_S = 0.25


class GateWatch:
    """Exchanges evidence with the other routers four times a second.

    One router, which has a lease in Redis, runs the golden prompts of a canary. Each router takes a
    canary out as soon as it has a reason.

    Without Redis each router runs the golden prompts, and judges by its own requests. It ends a
    canary for itself, and for all routers when Redis answers.
    """

    def __init__(self, router: Process, shared: SharedGates) -> None:
        self._router = router
        self._shared = shared
        self._golden = GoldenRunner(router)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._ended_here: dict[str, Gate] = {}

    def start(self) -> None:
        """Start to follow the gates of canaries."""
        self._router.tasks.keep(self._follow, "gates")

    async def _follow(self) -> None:
        gates = self._router.gates
        while True:
            gates.follow(self._router.routes.table)
            for gate in gates:
                call = self._calls.get(gate.name)
                if call is None or call.done():
                    self._calls[gate.name] = self._router.tasks.spawn(self._exchange(gate), "gate")
            if not self._router.routes.away:
                for gate in list(self._ended_here.values()):
                    await self._take_out(gate)
            await asyncio.sleep(PERIOD_S)
            for gate in gates:
                if gate.name in self._calls and not self._calls[gate.name].done():
                    self._judge_alone(gate)

    async def _exchange(self, gate: Gate) -> None:
        number, fresh = gate.take()
        since_ms = gate.entry.since_ms
        router_id = self._router.router_id
        try:
            sums = await self._shared.exchange(router_id, gate.name, since_ms, fresh, number)
        except RegistryUnavailableError:  # the registry counts it
            self._run_golden(gate)
            self._judge_alone(gate)
            return
        gate.confirmed()
        reason = gate.judge(sums.evidence)
        if sums.is_runner:
            self._run_golden(gate)
        else:
            gate.last_round = sums.last_round
        if reason:
            await self._take_out(gate)

    def _judge_alone(self, gate: Gate) -> None:
        """End a canary or shadow at this router, by what it has counted itself."""
        name = gate.name
        is_current = self._router.gates.get(name) is gate and name not in self._ended_here
        if not is_current or not gate.judge_alone():
            return
        self._ended_here[name] = gate
        self._router.routes.end_here(name, gate.entry, gate.reason)
        _LOG.error(
            "rolled back at this router, and at the others when Redis answers: name=%s %s=%s: %s",
            name,
            _kind(gate.entry),
            gate.entry.candidate,
            gate.reason,
        )

    def _run_golden(self, gate: Gate) -> None:
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
        golden = await self._golden.run(gate.entry.candidate)
        gate.on_round(golden)  # the next exchange acts on a reason
        try:
            await self._shared.put_round(gate.name, gate.entry.since_ms, golden)
        except RegistryUnavailableError as error:
            _LOG.warning("cannot write the result of golden prompts: %s", error)

    async def _take_out(self, gate: Gate) -> None:
        """End a canary or shadow at all routers; without Redis at this one."""
        routes = self._router.routes
        name = gate.name
        tried = gate.entry
        model = tried.candidate
        try:
            before, after = await routes.change(
                lambda table, _: thrown_out(table, name, tried, gate.reason)
            )
        except TableChangeError:  # another router or an operator was faster
            self._ended_here.pop(name, None)
            return
        except RegistryUnavailableError:
            self._judge_alone(gate)
            return
        self._ended_here.pop(name, None)
        self._router.gates.follow(after)
        self._router.metrics.inc("baton_model_rollbacks", model=model)
        _LOG.warning("rolled back name=%s %s=%s: %s", name, _kind(tried), model, gate.reason)
        if self._router.audit is not None:
            entry = Entry(
                verb="models rollback",
                what=name,
                who=f"router {self._router.router_id}",
                before=route_entry(before.names.get(name)),
                after=route_entry(after.names.get(name)),
            )
            await self._router.audit.write(entry)


def _kind(entry: NameRoute) -> str:
    return "canary" if entry.canary else "shadow"
