"""Measures each split of a fleet under more load than it holds, then the planner.

1. Each split p + d gets the same overload: its good responses per second are what it can serve.
2. The best split gets what it could serve: 1.0 × is the highest tried rate that it holds.
3. The fleet starts with the first and the last of the other splits (quick: with the worst one),
   with an idle planner in ``auto``, at 1.5 ×.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.client.records import CallRecord, ServerOptions
from loadtest.client.server import Server, ServerError
from loadtest.commands.options import echo
from loadtest.commands.points import measured
from loadtest.goodput.fleet import SizedFleet
from loadtest.goodput.measure import TRIED, alone_s, goodput, held_rate, send_phases
from loadtest.goodput.phases import GoodLimits, PhaseFigures, phases_of
from loadtest.lab.places import awaiting
from loadtest.lab.results import Findings
from loadtest.lab.split_findings import (
    OVERLOAD,
    MeasuredSplit,
    Steered,
    findings_of,
    findings_so_far,
)
from loadtest.lab.table import LabContext

ANSWER_TOKENS = 200
_SPLIT_S = 40.0
_QUICK_SPLIT_S = 20.0
_STEERED_S = 90.0
_FORGET_S = 60.0  # without load, the planner forgets the load before
_REQUEST_LIMIT_S = 120.0
_LATER_POINTS = 2  # the rate that the best split holds, and the planner's runs


def run(context: LabContext) -> Findings:
    """Measure the fleet of the context, which needs latency limits."""
    with SizedFleet(context.url, context.api_key) as fleet:
        slo = fleet.slo()
        workers = sum(fleet.sizes().values())
        if slo is None:
            raise ServerError("the fleet has no `slo`: without latency limits no response is good")
        if workers < 2:
            raise ServerError(f"the fleet has {workers} ready workers: a split needs two")
        with Server(context.url, context.api_key) as server:
            options = ServerOptions(
                url=server.url,
                model=server.first_model(),
                api_key=context.api_key,
                timeout_s=_REQUEST_LIMIT_S,
                headers={"x-baton-mode": "disaggregated"},
            )
        seconds = _QUICK_SPLIT_S if context.quick else _SPLIT_S
        fleet.plan("hold")
        own_s = asyncio.run(alone_s(options))
        limits = GoodLimits(ttft_s=slo[0], itl_s=slo[1], own_s=own_s)
        return _Lab(fleet, options, limits, workers, seconds, context.quick).run()


@dataclass(frozen=True)
class _Lab:
    fleet: SizedFleet
    options: ServerOptions
    limits: GoodLimits
    workers: int
    seconds: float
    quick: bool

    def run(self) -> Findings:
        rate = self.workers / self.limits.own_s  # more than all workers together can compute
        planned = 1 if self.quick else 2
        echo(
            f"[dim]{self.workers - 1} splits of {self.seconds:g} s, at most {len(TRIED)} rates of "
            f"the best one, {planned} × {_FORGET_S + _STEERED_S:g} s with the planner[/]"
        )
        splits = measured(range(1, self.workers), lambda prefill: self._split(prefill, rate))
        if splits.left_out:
            return self._so_far(splits, splits.left_out + _LATER_POINTS)
        try:
            return self._compared(splits)
        except KeyboardInterrupt:
            return self._so_far(splits, _LATER_POINTS)

    def _so_far(self, splits: list[MeasuredSplit], left_out: int) -> Findings:
        return findings_so_far(splits, self.limits, ANSWER_TOKENS, left_out)

    def _compared(self, splits: list[MeasuredSplit]) -> Findings:
        ordered = sorted(splits, key=lambda split: split.figures.good_per_s)
        best = ordered[-1]
        others = [split for split in splits if split is not best] or splits
        starts = ordered[:1] if self.quick else list(dict.fromkeys([others[0], others[-1]]))
        self._become(best.prefill)
        echo(f"[dim]{best.name}: the rate that it holds[/]")
        base = asyncio.run(held_rate(self._tried, best.figures))
        if base is None:
            raise ServerError(f"{best.name} holds no tried rate: too little is good")
        steered = [self._steer(start, OVERLOAD * base.rate) for start in starts]
        return findings_of(splits, base, steered, self.limits, ANSWER_TOKENS)

    def _split(self, prefill: int, rate: float) -> MeasuredSplit:
        self._become(prefill)
        split = f"{prefill} + {self.workers - prefill}"
        echo(f"[dim]{split}: {rate:.1f} requests/s for {self.seconds:g} s[/]")
        with awaiting("the load", self.seconds):
            figures = asyncio.run(self._measured(rate))
        return MeasuredSplit(prefill=prefill, decode=self.workers - prefill, figures=figures)

    async def _tried(self, rate: float) -> PhaseFigures:
        echo(f"[dim]{rate:.1f} requests/s for {self.seconds:g} s[/]")
        with awaiting("the load", self.seconds):
            return await self._measured(rate)

    async def _measured(self, rate: float) -> PhaseFigures:
        return await goodput(rate, self.seconds, self.options, self.limits, ANSWER_TOKENS)

    def _become(self, prefill: int) -> None:
        self.fleet.split(prefill, self.workers - prefill)

    def _steer(self, start: MeasuredSplit, rate: float) -> Steered:
        self._become(start.prefill)
        echo(f"[dim]{_FORGET_S:g} s without load[/]")
        with awaiting("the planner to forget the load before", _FORGET_S):
            time.sleep(_FORGET_S)
        self.fleet.plan("auto")
        echo(f"[dim]{start.name} with the planner: {rate:.1f} requests/s for {_STEERED_S:g} s[/]")
        zero: list[float] = []
        try:
            with awaiting("the load", _STEERED_S):
                records = asyncio.run(self._sent(rate, zero.append))
            began = time.time() - (time.monotonic() - zero[0])
            decided = [(at - began, text) for at, text in self.fleet.decisions(began)]
            return Steered(
                start=start.name,
                rate=rate,
                seconds=_STEERED_S,
                records=records,
                decisions=[decision for decision in decided if decision[0] <= _STEERED_S],
            )
        finally:
            self.fleet.plan("hold")

    async def _sent(self, rate: float, on_start: Callable[[float], None]) -> list[CallRecord]:
        phases = phases_of([("planner", rate, _STEERED_S)])
        return await send_phases(phases, self.options, ANSWER_TOKENS, on_start)
