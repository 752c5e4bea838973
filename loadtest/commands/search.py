"""`baton loadtest search`: the highest rate that meets an SLO."""

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from loadtest.commands import options as o
from loadtest.commands.option_groups import with_options
from loadtest.commands.running import INTERRUPTED, run, write_folder
from loadtest.results.files import Results, SearchPoint
from loadtest.results.tables import search_table
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.synthetic import DISTURBANCES, OpenLoop, open_loop_plan

_LOWEST = 0.01


@dataclass(frozen=True, kw_only=True)
class _Arrivals(OpenLoop):
    rate: Annotated[float, typer.Option(help="First rate in requests per second.")] = 1.0
    requests: Annotated[int, typer.Option(min=20, help="Requests per rate.")] = 200


@dataclass(frozen=True, kw_only=True)
class _Precision:
    precision: Annotated[
        float, typer.Option(min=0.01, help="Relative precision of the result.")
    ] = 0.1
    warmup_share: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each rate's time to exclude.")
    ] = 0.1


@with_options("tenant_keys", "ignore_eos", "warmup_s", *DISTURBANCES)
def search(
    ctx: typer.Context,
    out: o.Out,
    arrivals: _Arrivals,
    choices: o.Choices,
    measured: _Precision,
    seed: o.Seed = 0,
) -> None:
    """Find the highest Poisson rate that meets the SLO; every rate gets new prompts.

    For publishable figures use `--requests 2000` and three seeds; the default is a first look.
    """
    with o.refusals():
        rates = RateSearch(arrivals.rate, precision=measured.precision)
        parse_lengths(arrivals.prompt_tokens)
        parse_lengths(arrivals.answer_tokens)
    o.check_out(out)
    run_options = o.run_options(choices, ctx.obj)
    runs: list[Results] = []
    interrupted = False
    while (tried := rates.next_rate()) is not None:
        load = replace(arrivals, rate=tried)
        plan = open_loop_plan(load, name="search", seed=1000 * seed + len(runs))
        warmup_s = measured.warmup_share * max(c.start_s for c in plan.conversations)
        at_rate = replace(run_options, warmup_s=warmup_s)
        results = run(plan, at_rate, None, label=f"{tried:.2f}/s")
        if interrupted := not results.complete:
            break
        runs.append(results)
        rates.points.append(_point(tried, results))
        Console().print(search_table(rates.points))
    if not runs:
        raise typer.Exit(INTERRUPTED)
    best = rates.best
    number = rates.points.index(best) if best is not None else len(runs) - 1
    write_folder(msgspec.structs.replace(runs[number], search=rates.points), out)
    if interrupted:
        o.echo("[yellow]interrupted: the report has the rates tried so far[/]")
        raise typer.Exit(INTERRUPTED)
    if best is None:
        o.fail(f"no tried rate meets {run_options.slo.label()}")
    Console().print(
        f"[bold]{run_options.slo.label()} = {best.good_per_s:.2f} good requests/s[/] "
        f"at {best.rate:.2f} requests/s sent"
    )


def _point(rate: float, results: Results) -> SearchPoint:
    summary = results.summary
    return SearchPoint(
        rate=rate,
        attainment=summary.attainment,
        met=summary.slo_met,
        good_per_s=summary.good_per_s,
        client_was_bottleneck=bool(summary.client.reasons),
    )


class RateSearch:
    """Chooses the next rate to try. Does no I/O.

    Doubles from ``first`` while the SLO is met (or halves while it is missed) until one rate meets
    it and a higher one misses it. Then bisects the interval, on a logarithmic scale, until the two
    rates are within ``precision`` of each other. Gives up below 0.01 requests per second, or
    after ``max_points`` rates.
    """

    def __init__(self, first: float, *, precision: float = 0.1, max_points: int = 12) -> None:
        if not first > 0 or not precision > 0:
            raise ValueError(f"first rate {first:g} and precision {precision:g} must be above 0")
        self._first = first
        self._precision = precision
        self._max_points = max_points
        self.points: list[SearchPoint] = []

    def next_rate(self) -> float | None:
        """Return the next rate to try; None when the search has ended."""
        if len(self.points) >= self._max_points:
            return None
        if not self.points:
            return self._first
        met = self.best
        missed = self._lowest_missed
        if met is None:
            rate = min(point.rate for point in self.points) / 2
            return rate if rate >= _LOWEST else None
        if missed is None:
            return 2 * met.rate
        if missed <= met.rate * (1 + self._precision):
            return None
        return float((met.rate * missed) ** 0.5)

    @property
    def best(self) -> SearchPoint | None:
        """Highest rate that met the SLO below every rate that missed it."""
        missed = self._lowest_missed
        met = [p for p in self.points if p.met and (missed is None or p.rate < missed)]
        return max(met, key=lambda point: point.rate, default=None)

    @property
    def _lowest_missed(self) -> float | None:
        return min((point.rate for point in self.points if not point.met), default=None)
