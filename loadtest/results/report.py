"""Self-contained ``report.html`` of a run, with the data of its plots.

Times are seconds; a line is (x, y), two equally long lists.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from loadtest.client.records import CallRecord
from loadtest.metrics import request_figures as figures
from loadtest.metrics.request_figures import FORMULAS, ttft_s
from loadtest.metrics.summary import LatencyGoals
from loadtest.results.files import Results, write_whole
from loadtest.results.tables import seconds

_HERE = Path(__file__).parent
Line = tuple[list[float], list[float | None]]

_CDF_POINTS = 200
_MAX_DOTS = 4_000
_MAX_BINS = 60
_MIN_BIN_S = 1.0

CDFS = ("ttft_s", "second_token_s", "itl_s", "tpot_s", "e2e_s")


def write_report(folder: Path, results: Results) -> Path:
    """Write ``report.html`` into a run's folder."""
    return write_whole(folder / "report.html", report(results).encode())


def report(results: Results) -> str:
    """Return the page: options, figures with formulas, plots, slowest requests."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["seconds"] = seconds
    return environment.get_template("report.html.jinja").render(
        results=results,
        summary=results.summary,
        formulas=FORMULAS,
        slowest=[(record, ttft_s(record)) for record in slowest(results.records)],
        uplot_js=_text("vendor/uPlot.iife.min.js"),
        uplot_css=_text("vendor/uPlot.min.css"),
        style=_text("report.css"),
        report_js=_text("report.js"),
        # Within a script element only `<` can end it.
        data=json.dumps(_data(results), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _text(file: str) -> str:
    return (_HERE / file).read_text(encoding="utf-8")


def _data(results: Results) -> dict[str, Any]:
    warmup_s = results.summary.warmup_s
    counted = [record for record in results.records if record.intended_s >= warmup_s]
    return {
        "latency": latency_over_time(results.records),
        "rates": rates_over_time(results.records, results.summary.slo),
        "cdfs": {name: cdf(counted, name) for name in CDFS},
        "search": [
            [point.rate, point.attainment, point.good_per_s]
            for point in sorted(results.search, key=lambda point: point.rate)
        ],
        "slo": {
            "ttft_s": results.summary.slo.ttft_s,
            "tpot_s": results.summary.slo.tpot_s,
            "quantile": results.summary.slo.quantile,
        },
    }


def cdf(records: Sequence[CallRecord], name: str) -> Line:
    """Return the cumulative distribution of a figure: (values, shares from 0 to 1)."""
    if name == "itl_s":
        values = np.concatenate([figures.gaps_s(record) for record in records] or [np.empty(0)])
    else:
        found = (figures.PER_REQUEST[name](record) for record in records)
        values = np.array([value for value in found if value is not None])
    if not values.size:
        return [], []
    shares = np.linspace(0, 1, min(_CDF_POINTS, values.size + 1))
    return _rounded(np.quantile(values, shares)), list(_rounded(shares))


def latency_over_time(
    records: Sequence[CallRecord],
) -> tuple[list[float], list[list[float | None]]]:
    """Return (times, [TTFT, longest ITL, 0 if failed]) of each request by its intended send.

    Of more than 4,000 requests every k-th one is included.
    """
    step = max(1, -(-len(records) // _MAX_DOTS))
    shown = sorted(records, key=lambda record: record.intended_s)[::step]
    lines: list[list[float | None]] = [[], [], []]
    for record in shown:
        failed = record.end not in ("ok", "aborted")
        lines[0].append(_round(figures.ttft_s(record)))
        lines[1].append(_round(figures.itl_longest_s(record)))
        lines[2].append(0.0 if failed else None)
    return [round(record.intended_s, 3) for record in shown], lines


def rates_over_time(
    records: Sequence[CallRecord], slo: LatencyGoals
) -> tuple[list[float], list[list[float | None]]]:
    """Return bin centres and, per bin, chunks/s, running requests, sent/s and good/s."""
    end_s = max((record.ended_s for record in records), default=0.0)
    begin_s = min((record.intended_s for record in records), default=0.0)
    if end_s <= begin_s:
        return [], [[], [], [], []]
    bins = int(np.clip((end_s - begin_s) / _MIN_BIN_S, 1, _MAX_BINS))
    edges = np.linspace(begin_s, end_s, bins + 1)
    width_s = float(edges[1] - edges[0])
    chunks = np.concatenate([np.array(r.chunk_s, dtype=np.float64) for r in records])
    intended = np.array([r.intended_s for r in records])
    good = np.array([r.intended_s for r in records if slo.met_by(r)])
    under_way = np.zeros(bins)
    for record in records:
        overlap = np.minimum(edges[1:], record.ended_s) - np.maximum(edges[:-1], record.intended_s)
        under_way += np.clip(overlap, 0, None) / width_s
    counts = [np.histogram(moments, edges)[0] / width_s for moments in (chunks, intended, good)]
    lines = [counts[0], under_way, counts[1], counts[2]]
    return _rounded((edges[1:] + edges[:-1]) / 2), [list(_rounded(line)) for line in lines]


def slowest(records: Sequence[CallRecord], count: int = 20) -> list[CallRecord]:
    """Return the requests with the largest TTFT, then failed ones."""
    failed = [record for record in records if record.end not in ("ok", "aborted")]
    answered = [record for record in records if record.end == "ok"]
    answered.sort(key=lambda record: figures.ttft_s(record) or 0.0, reverse=True)
    return [*answered[: count - min(count // 2, len(failed))], *failed[: count // 2]]


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in np.round(values, 5)]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
