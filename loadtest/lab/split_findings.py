"""Findings of the lab `split`, from what was measured. Does no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.client.records import CallRecord
from loadtest.goodput.phases import (
    PROMPT_TOKENS,
    GoodLimits,
    LoadPhase,
    PhaseFigures,
    figures_of,
    good_over_time,
)
from loadtest.lab.results import Cell, Findings, Plot, Series

OVERLOAD = 1.5
"""Load of the planner, in multiples of the rate that the best split holds."""

KEPT = 0.9
"""Part of the best split's goodput at 1.0 × that the planner should reach within a minute."""

MINUTE_S = 60.0
_WIDTH_S = 10.0
_COLUMNS = ["split", "offered/s", "good/s", "good", "refused", "good of admitted"]


@dataclass(frozen=True, kw_only=True)
class MeasuredSplit:
    """Split of the workers, with its figures under more load than it holds."""

    prefill: int
    decode: int
    figures: PhaseFigures

    @property
    def name(self) -> str:
        """Both sizes, as in ``1 + 3``."""
        return f"{self.prefill} + {self.decode}"


@dataclass(frozen=True, kw_only=True)
class Steered:
    """Run that starts with one split and has the planner.

    Attributes:
        start: Split before.
        decisions: Decisions that were applied, with seconds since the start.
    """

    start: str
    rate: float
    seconds: float
    records: Sequence[CallRecord]
    decisions: Sequence[tuple[float, str]]


def findings_of(
    splits: Sequence[MeasuredSplit],
    base: PhaseFigures,
    steered: Sequence[Steered],
    limits: GoodLimits,
    answer_tokens: int,
) -> Findings:
    """Return the table, the plots and the conclusion.

    Args:
        splits: Every split, with its figures.
        base: Figures of the best split at the rate that it holds.
        steered: Runs of the planner.
        limits: Limits of a good response.
        answer_tokens: Length of every response.
    """
    best = max(splits, key=lambda split: split.figures.good_per_s)
    results = [_result(run, best, base, limits) for run in steered]
    return Findings(
        parameters={
            **_parameters(limits, answer_tokens),
            "rate that the best split holds (1.0 x), 1/s": base.rate,
            **{f"decisions of the planner from {run.start}": _decisions(run) for run in steered},
        },
        columns=_COLUMNS,
        rows=[
            *(_row(split.name, split.figures) for split in splits),
            _row(f"{best.name} at 1.0 x", base),
            *(row for result in results for row in result.rows),
        ],
        plots=[_plot_of_splits(splits), *(result.plot for result in results)],
        sentence=f"{best.name} is the best split: {best.figures.good_per_s:.2f} good responses/s, "
        f"and {base.good_per_s:.2f} at the {base.rate:.2f} requests/s that it holds. "
        + " ".join(result.sentence for result in results),
        notes=[
            "Requests count at the time when they were to be sent. All are disaggregated.",
            "Good of admitted: without the requests that got 429.",
        ],
    )


@dataclass(frozen=True, kw_only=True)
class _Result:
    """Rows, plot and conclusion of one run of the planner."""

    rows: list[list[Cell]]
    plot: Plot
    sentence: str


def _result(
    steered: Steered, best: MeasuredSplit, base: PhaseFigures, limits: GoodLimits
) -> _Result:
    over_time = good_over_time(steered.records, limits, steered.seconds, _WIDTH_S)
    kept_per_s = KEPT * base.good_per_s
    title = f"{steered.start} with the planner at {OVERLOAD:g} x"
    parts = [("first minute", 0.0, MINUTE_S), ("after a minute", MINUTE_S, steered.seconds)]
    phases = [
        LoadPhase(name=name, rate=steered.rate, begin_s=begin_s, end_s=end_s)
        for name, begin_s, end_s in parts
    ]
    figures = [figures_of(phase, steered.records, limits) for phase in phases]
    kept_s = _kept_from_s(over_time, kept_per_s)
    when = "at no time" if kept_s is None else f"from {kept_s:g} s on"
    ratio = figures[-1].good_per_s / base.good_per_s
    return _Result(
        rows=[
            _row(f"{title}, {phase.name}", phase_figures)
            for phase, phase_figures in zip(phases, figures, strict=True)
        ],
        plot=Plot(
            title=title,
            x_label="seconds",
            y_label="good responses/s",
            x=[(place + 0.5) * _WIDTH_S for place in range(len(over_time))],
            series=[
                Series("planner", [*over_time]),
                Series(f"{best.name} at 1.0 x", [base.good_per_s] * len(over_time)),
                Series(f"{KEPT:g} of it", [kept_per_s] * len(over_time)),
            ],
            caption="; ".join(f"{at_s:.0f} s: {text}" for at_s, text in steered.decisions),
        ),
        sentence=f"From {steered.start} at {OVERLOAD:g} x with the planner, the fleet served "
        f"{ratio:.2f} of that after a minute, and {KEPT:g} of it {when}; changes by the planner: "
        f"{len(steered.decisions)}.",
    )


def _decisions(steered: Steered) -> str:
    return "; ".join(f"at {at_s:.0f} s {text}" for at_s, text in steered.decisions) or "none"


def findings_so_far(
    splits: Sequence[MeasuredSplit], limits: GoodLimits, answer_tokens: int, left_out: int
) -> Findings:
    """Return the table and the plot of the splits that were measured before Ctrl-C."""
    best = max(splits, key=lambda split: split.figures.good_per_s)
    return Findings(
        parameters=_parameters(limits, answer_tokens),
        columns=_COLUMNS,
        rows=[_row(split.name, split.figures) for split in splits],
        plots=[_plot_of_splits(splits)],
        sentence=f"{best.name} is the best of the measured splits: "
        f"{best.figures.good_per_s:.2f} good responses/s. The planner was not measured.",
        left_out=left_out,
    )


def _parameters(limits: GoodLimits, answer_tokens: int) -> dict[str, Cell]:
    return {
        "prompt and output tokens": f"{PROMPT_TOKENS} and {answer_tokens}",
        "limits": f"TTFT {limits.ttft_s:g} s + twice the prompt's own time, ITL {limits.itl_s:g} s",
        "TTFT of a prompt alone, s": limits.own_s,
    }


def _plot_of_splits(splits: Sequence[MeasuredSplit]) -> Plot:
    return Plot(
        title="Goodput of each split",
        x_label="prefill + decode workers",
        y_label="good responses/s",
        x=[float(place) for place in range(len(splits))],
        labels=[split.name for split in splits],
        series=[Series("good", [split.figures.good_per_s for split in splits])],
        caption=f"Each was offered {splits[0].figures.rate:.2f} requests/s.",
    )


def _kept_from_s(good_per_s: Sequence[float], kept_per_s: float) -> float | None:
    """Return the time from which the mean until the end is enough; None if there is none."""
    for place in range(len(good_per_s)):
        rest = good_per_s[place:]
        if sum(rest) >= kept_per_s * len(rest):
            return place * _WIDTH_S
    return None


def _row(name: str, figures: PhaseFigures) -> list[Cell]:
    return [
        name,
        figures.rate,
        figures.good_per_s,
        figures.good_share,
        figures.refused / max(figures.sent, 1),
        figures.good_of_admitted,
    ]
