"""Self-contained ``report.html`` of a run."""

import json
from pathlib import Path
from typing import Any

import jinja2

from loadtest.metrics.request_figures import FORMULAS, ttft_s
from loadtest.results import series
from loadtest.results.files import Results, write_whole
from loadtest.results.tables import seconds

_HERE = Path(__file__).parent


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
        slowest=[(record, ttft_s(record)) for record in series.slowest(results.records)],
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
        "latency": series.latency_over_time(results.records),
        "rates": series.rates_over_time(results.records, results.summary.slo),
        "cdfs": {name: series.cdf(counted, name) for name in series.CDFS},
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
