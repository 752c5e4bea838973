"""``report.html``: one file that needs nothing else, for people who were not there."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from loadtest.metrics.request_figures import FORMULAS, ttft_s
from loadtest.results import series
from loadtest.results.files import Results
from loadtest.results.tables import seconds

_HERE = Path(__file__).parent


def write_report(folder: Path, results: Results) -> Path:
    """Write ``report.html`` into a run's folder."""
    file = folder / "report.html"
    scratch = file.with_suffix(".new")
    scratch.write_text(report(results), encoding="utf-8")
    scratch.replace(file)
    return file


def report(results: Results) -> str:
    """The page: what was asked, the figures with their formulas, plots, the slowest requests."""
    loader = jinja2.FileSystemLoader(_HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["seconds"] = seconds
    vendor = files("router") / "page" / "vendor"
    return environment.get_template("report.html.jinja").render(
        results=results,
        summary=results.summary,
        formulas=FORMULAS,
        slowest=[(record, ttft_s(record)) for record in series.slowest(results.records)],
        uplot_js=(vendor / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        uplot_css=(vendor / "uPlot.min.css").read_text(encoding="utf-8"),
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        report_js=(_HERE / "report.js").read_text(encoding="utf-8"),
        # Within a script element only `<` could end it.
        data=json.dumps(_data(results), separators=(",", ":")).replace("<", "\\u003c"),
    )


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
