"""Runs a drill: golden responses first, then load with the fault, then checks of what is left."""

import asyncio
import itertools
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loadtest.client.processes import ClientFailedError, run_clients
from loadtest.client.records import CallRecord, ServerOptions
from loadtest.client.server import ServerError
from loadtest.commands.options import LocalFleet
from loadtest.drill.drills import DRILLS, Drill
from loadtest.drill.faults import Scene, model_with_copy
from loadtest.drill.fleet import DrillError, DrillFaultError, FleetView, all_at_rest, all_ready
from loadtest.drill.overload import HOLDS_SHARE, judge_overload, overload_phases
from loadtest.drill.phases import (
    GoodLimits,
    LoadPhase,
    PhaseFigures,
    figures_of,
    phased_plan,
    phases_of,
)
from loadtest.drill.verdict import DrillOutcome, DrillRun, ShownWorker, judge
from loadtest.metrics import request_figures
from loadtest.workloads.arrivals import arrival_times_s
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

_PROMPTS = 12
_PROMPT_TOKENS = (24, 60, 120, 240)
_ANSWER_TOKENS = (8, 24, 48)
_REST_LIMIT_S = 10.0
_READY_LIMIT_S = 240.0
_PROBE_GAP_S = 1.0
_ROUTES_S = 1.0  # within which all routers apply a change of routes
_SEARCH_S = 20.0  # of each rate that is tried
HELD_SHARE = 0.95
"""Share of good responses at a rate that a fleet holds."""

TRIED = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the goodput under overload that `held_rate` tries, until the fleet holds one."""

_ALONE = 4


@dataclass(frozen=True, kw_only=True)
class DrillOptions:
    """Options of all drills. Requests are greedy, and responses as long as planned."""

    server: ServerOptions
    local: LocalFleet  # the fleet on this machine
    rate: float = 1.0  # requests per second that the fleet serves easily
    holds: float | None = None  # requests per second that a fleet with `slo` holds; None: search
    seed: int = 0


class DrillRunner:
    """Runs drills one after another, all against the same golden responses."""

    def __init__(self, options: DrillOptions) -> None:
        self._options = options
        self._golden: list[str] = []
        self._capacity = 0.0  # requests per second

    async def check(self, names: Sequence[str]) -> None:
        """Check that the fleet has the models that the drills need.

        Raises:
            DrillError: It lacks one.
        """
        if any(DRILLS[name].wrong_model for name in names):
            local = self._options.local
            async with FleetView(local.url, local.operator_key) as fleet:
                await model_with_copy(fleet)

    async def take_golden_answers(self) -> None:
        """Send every prompt alone and then all at once; the responses must agree.

        The second pass also measures the fleet's capacity in requests per second.

        Raises:
            DrillError: They differ, or a request failed, so that the fleet cannot be judged.
        """
        turns = [_turn(index, index) for index in range(_PROMPTS)]
        alone = self._plan((Conversation(start_s=0.0, turns=tuple(turns)),))
        together = self._plan(tuple(Conversation(start_s=0.0, turns=(turn,)) for turn in turns))
        passes: list[list[str]] = []
        for plan in (alone, together):
            records = sorted(await self._send(plan), key=lambda record: record.index)
            if bad := [record for record in records if record.end != "ok"]:
                raise DrillError(f"golden response: {bad[0].end} {bad[0].status} {bad[0].detail}")
            passes.append([record.answer or "" for record in records])
            self._capacity = _PROMPTS / max(record.ended_s for record in records)
        if passes[0] != passes[1]:
            raise DrillError("two greedy responses to one prompt differ without any fault")
        self._golden = passes[0]

    async def run(self, name: str) -> DrillOutcome:
        """Run one drill on an idle fleet."""
        drill = DRILLS[name]
        options = self._options
        async with FleetView(options.local.url, options.local.operator_key) as fleet:
            if not all_at_rest(workers := await fleet.wait(all_at_rest, _READY_LIMIT_S)):
                raise DrillError(f"the fleet is not idle before the drill: {_summary(workers)}")
            if name == "overload" and (limits := await self._limits(fleet)) is not None:
                return await self._overload(fleet, limits)
            run = await self._load_and_fault(drill, Scene(fleet, options.local))
            await self._probe_until_answered(run)
            await fleet.wait(all_ready, _READY_LIMIT_S)  # restarted workers may still be loading
            workers = await fleet.wait(all_at_rest, _REST_LIMIT_S)
        golden = {index: self._golden[index % _PROMPTS] for index in run.planned}
        limit_s = drill.recovery_limit_s
        return judge(name, run, golden, workers, may_fail=drill.may_fail, recovery_limit_s=limit_s)

    async def _limits(self, fleet: FleetView) -> GoodLimits | None:
        """Return the fleet's latency limits, and the time of a prompt alone; None without."""
        slo = await fleet.slo()
        if slo is None:
            return None
        try:
            own_s = await alone_s(self._options.server)
        except ServerError as error:
            raise DrillError(str(error)) from error
        return GoodLimits(ttft_s=slo[0], itl_s=slo[1], own_s=own_s)

    async def _overload(self, fleet: FleetView, limits: GoodLimits) -> DrillOutcome:
        rate = self._options.holds
        if rate is None:
            rate = await self._find_rate(len(await fleet.workers()), limits)
        phases = overload_phases(rate)
        records = await send_phases(phases, self._options.server)
        base = figures_of(phases[0], records, limits)
        if base.good_share < HOLDS_SHARE:
            raise DrillError(
                f"the fleet does not hold {rate:.2f} requests/s: only "
                f"{100 * base.good_share:.0f} % were good; set a lower --holds"
            )
        probes = DrillRun(planned=[])
        await self._probe_until_answered(probes)
        workers = await fleet.wait(all_at_rest, _REST_LIMIT_S)
        return judge_overload(
            DrillRun(list(range(phased_plan(phases, 0).request_count)), records),
            phases,
            limits,
            probes=probes.records,
            golden={index: self._golden[index % _PROMPTS] for index in probes.planned},
            workers=workers,
        )

    async def _find_rate(self, workers: int, limits: GoodLimits) -> float:
        """Return the highest tried rate that the fleet holds, at first more than it can hold."""

        async def measure(rate: float) -> PhaseFigures:
            return await goodput(rate, _SEARCH_S, self._options.server, limits)

        held = await held_rate(measure, await measure(workers / limits.own_s))
        if held is None:
            raise DrillError("the fleet holds no tried rate: set --holds")
        return held.rate

    async def _load_and_fault(self, drill: Drill, scene: Scene) -> DrillRun:
        rng = np.random.default_rng(self._options.seed)
        rate = self._options.rate
        if drill.of_capacity is not None:
            rate = drill.of_capacity * self._capacity
        starts_s = arrival_times_s(rng, max(8, round(rate * drill.load_s)), rate)
        aborts = rng.random((len(starts_s), 2))
        conversations = tuple(
            Conversation(start_s=float(start_s), turns=(_turn(index, index % _PROMPTS, abort_s),))
            for index, start_s in enumerate(starts_s)
            for abort_s in [_abort_s(drill, *map(float, aborts[index]))]
        )
        run = DrillRun(planned=list(range(len(conversations))))
        began = asyncio.Event()

        def start(zero_s: float) -> None:
            run.zero_s = zero_s
            began.set()

        async def inject() -> None:
            await began.wait()
            wait_s = run.zero_s + drill.fault_after_s - time.monotonic()
            await asyncio.sleep(max(0.0, wait_s))
            run.fault_s = time.monotonic() - run.zero_s
            try:
                run.what_was_done = await drill.fault(scene)
            except DrillFaultError as error:
                run.faults.append(str(error))
            except DrillError as error:  # raised after the load has ended
                run.undone = error
            if drill.wrong_model:
                run.other_until_s = time.monotonic() - run.zero_s + _ROUTES_S

        plan = self._plan(conversations)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(inject())
                run.records = await self._send(plan, start, mode=drill.mode)
        except* ClientFailedError as failed:
            run.undone = DrillError(str(failed.exceptions[0]))
        if run.undone is not None:
            raise run.undone
        return run

    async def _probe_until_answered(self, run: DrillRun) -> None:
        until_s = time.monotonic() + _READY_LIMIT_S
        for index in itertools.count(len(run.planned)):
            await self._send_more(run, [index])
            if run.records[-1].end == "ok" or time.monotonic() > until_s:
                break
            await asyncio.sleep(_PROBE_GAP_S)
        # After recovery the fleet must still give the right response to every prompt.
        first = len(run.planned)
        await self._send_more(run, range(first, first + _PROMPTS))

    async def _send_more(self, run: DrillRun, indexes: Sequence[int]) -> None:
        """Send requests after the load, one after another, on the run's clock."""
        turns = tuple(_turn(index, index % _PROMPTS) for index in indexes)
        zero: list[float] = []
        records = await self._send(
            self._plan((Conversation(start_s=0.0, turns=turns),)), zero.append
        )
        run.planned += indexes
        run.records += [_moved(record, zero[0] - run.zero_s) for record in records]

    async def _send(
        self, plan: Plan, on_start: Callable[[float], None] | None = None, mode: str | None = None
    ) -> list[CallRecord]:
        records: list[CallRecord] = []
        server = self._options.server
        if mode is not None:
            headers = {**server.headers, "x-baton-mode": mode}
            server = msgspec.structs.replace(server, headers=headers)
        await run_clients(
            plan, server, clients=1, record=records.append, keep_answers=True, on_start=on_start
        )
        return records

    def _plan(self, conversations: tuple[Conversation, ...]) -> Plan:
        return Plan(name="drill", seed=self._options.seed, conversations=conversations)


def _turn(index: int, prompt: int, abort_after_s: float | None = None) -> Turn:
    """Return a request for golden prompt ``prompt``; half of the prompts share a prefix."""
    shared = (Segment(1, 64),) if prompt % 2 else ()
    own = Segment(UNIQUE_KEYS + prompt, _PROMPT_TOKENS[prompt % len(_PROMPT_TOKENS)])
    return Turn(
        index=index,
        prompt=(*shared, own),
        max_tokens=_ANSWER_TOKENS[prompt % len(_ANSWER_TOKENS)],
        abort_after_s=abort_after_s,
    )


def _abort_s(drill: Drill, drawn: float, after: float) -> float | None:
    """Return 0.1 to 1 s after sending for the drill's share of clients, else None."""
    return 0.1 + 0.9 * after if drawn < drill.abort_share else None


def _moved(record: CallRecord, by_s: float) -> CallRecord:
    return msgspec.structs.replace(
        record,
        intended_s=record.intended_s + by_s,
        sent_s=record.sent_s + by_s,
        connected_s=None if record.connected_s is None else record.connected_s + by_s,
        chunk_s=[moment_s + by_s for moment_s in record.chunk_s],
        ended_s=record.ended_s + by_s,
    )


def _summary(workers: list[ShownWorker]) -> str:
    return "; ".join(f"{w.id} {w.state} {' '.join(w.leaks())}".strip() for w in workers)


async def send_phases(phases: Sequence[LoadPhase], server: ServerOptions) -> list[CallRecord]:
    """Send the load of some phases; return the records when all requests have ended."""
    records: list[CallRecord] = []
    plan = phased_plan(phases, secrets.randbits(32))
    await run_clients(plan, server, clients=1, record=records.append)
    return records


async def alone_s(server: ServerOptions) -> float:
    """Return the median TTFT of prompts that are sent one after another.

    Raises:
        ServerError: A request failed.
    """
    times_s: list[float] = []
    for _ in range(_ALONE):
        phase = LoadPhase(name="alone", rate=1.0, begin_s=0.0, end_s=1.0)
        (record,) = await send_phases([phase], server)
        ttft_s = request_figures.ttft_from_send_s(record)
        if record.end != "ok" or ttft_s is None:
            raise ServerError(f"a request to the idle fleet failed: {record.end} {record.detail}")
        times_s.append(ttft_s)
    return statistics.median(times_s[1:])  # the first may start something


async def goodput(
    rate: float, seconds: float, server: ServerOptions, limits: GoodLimits
) -> PhaseFigures:
    """Return the figures of some seconds at one rate."""
    (phase,) = phases_of([(f"{rate:.2f}/s", rate, seconds)])
    return figures_of(phase, await send_phases([phase], server), limits)


Measure = Callable[[float], Awaitable[PhaseFigures]]
"""Function that measures a rate in requests per second."""


async def held_rate(measure: Measure, overload: PhaseFigures) -> PhaseFigures | None:
    """Return the figures of the highest tried rate whose responses are nearly all good.

    Tries the goodput that the fleet had under ``overload``, then less; None if it holds no rate.
    """
    if overload.good_share >= HELD_SHARE:
        return overload
    for share in TRIED:
        if not overload.good_per_s:
            break
        held = await measure(share * overload.good_per_s)
        if held.good_share >= HELD_SHARE:
            return held
    return None
