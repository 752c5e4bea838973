"""Self-contained ``report.html`` of a run."""

from pathlib import Path
from typing import Any

from loadtest.metrics.request_figures import FORMULAS, ttft_s
from loadtest.results import series
from loadtest.results.files import Results
from loadtest.results.page import rendered, write_whole
from loadtest.results.tables import seconds

_HERE = Path(__file__).parent


def write_report(folder: Path, results: Results) -> Path:
    """Write ``report.html`` into a run's folder."""
    return write_whole(folder / "report.html", report(results).encode())


def report(results: Results) -> str:
    """Return the page: options, figures with formulas, plots, slowest requests."""
    return rendered(
        _HERE,
        _data(results),
        {"seconds": seconds},
        results=results,
        summary=results.summary,
        formulas=FORMULAS,
        slowest=[(record, ttft_s(record)) for record in series.slowest(results.records)],
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
