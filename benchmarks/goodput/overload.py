"""Good requests of a fleet under more load than it holds, beside another checkout.

    python -m benchmarks.goodput.overload --out DIR [--only emulated,pair] [--beside TREE]

- ``emulated``: two prefill and two decode workers with the timing model epyc-135m
- ``pair``: one prefill and one decode worker with SmolLM2-135M

The rate that this checkout holds is searched for first, unless ``--rate`` gives it. Then each side
gets that rate, and 1.5 times that rate for five minutes, each time on a fresh fleet. TREE must have
an environment in TREE/.venv; its fleet gets no ``slo`` if it does not know the key.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.layouts import bench_fleet, run_whole
from loadtest.client.records import ServerOptions
from loadtest.client.server import Server
from loadtest.metrics.summary import Slo
from loadtest.percent import percent
from loadtest.rate_search import RateSearch
from loadtest.results.files import Results, SearchPoint, write_results
from loadtest.run import RunOptions
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan

SLO = Slo(ttft_s=2.0, tpot_s=0.1, quantile=0.95, from_second=True)
OVERLOAD = 1.5
GOAL = 0.95

_SEARCH_S = 40.0
_GATE = f"slo: {{ttft_s: {SLO.ttft_s}, itl_s: {SLO.tpot_s}}}\n"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fleet and the load that suits it."""

    settings: str
    prompt_tokens: str
    answer_tokens: str
    first_rate: float


KINDS = {
    "emulated": Kind(
        settings="pools: {prefill: 2, decode: 2, engine: emulated}\nkv_blocks_per_worker: 2048\n",
        prompt_tokens="uniform:64-768",
        answer_tokens="uniform:16-64",
        first_rate=2.0,
    ),
    "pair": Kind(
        settings="pools: {prefill: 1, decode: 1}\nkv_blocks_per_worker: 1024\n",
        prompt_tokens="uniform:64-512",
        answer_tokens="uniform:16-64",
        first_rate=0.5,
    ),
}


def run_at(kind: Kind, rate: float, duration_s: float, url: str, seed: int) -> Results:
    """Send requests at random times to a server; return the results without the first tenth."""
    load = OpenLoop(
        requests=max(round(rate * duration_s), 20),
        rate=rate,
        prompt_tokens=parse_lengths(kind.prompt_tokens),
        answer_tokens=parse_lengths(kind.answer_tokens),
    )
    with Server(url) as server:
        wanted = ServerOptions(url=server.url, model=server.first_model(), ignore_eos=True)
        options = RunOptions(server=server.settle(wanted), slo=SLO, warmup_s=duration_s / 10)
    return run_whole(open_loop_plan(load, name="overload", seed=seed), options)


def held_rate(kind: Kind, url: str, console: Console) -> float:
    """Return the highest rate at which 95 % of the requests are good.

    Raises:
        RuntimeError: No rate is.
    """
    search = RateSearch(kind.first_rate, precision=0.15)
    while (rate := search.next_rate()) is not None:
        summary = run_at(kind, rate, _SEARCH_S, url, len(search.points)).summary
        console.print(f"{rate:.2f} requests/s: {percent(summary.attainment)} good")
        search.add(
            SearchPoint(
                rate=rate,
                attainment=summary.attainment,
                met=summary.slo_met,
                good_per_s=summary.good_per_s,
                client_was_bottleneck=summary.client.was_bottleneck,
            )
        )
    if search.best is None:
        raise RuntimeError(f"no tried rate meets {SLO.label()}")
    return search.best.rate


def good_by_fleet(url: str) -> float | None:
    """Return the share of good responses among the admitted ones as the router counts it.

    Its limit of the first token is ``ttft_s`` plus twice the prompt's own time, which the clients
    of this bench do not know. None: the fleet has no ``slo``.
    """
    page = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    counts = {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "baton_slo_requests_total"
    }
    admitted = sum(count for outcome, count in counts.items() if outcome != "refused")
    return counts.get("good", 0.0) / admitted if admitted else None


def row(
    side: str, factor: float, results: Results, by_fleet: float | None
) -> dict[str, str | float]:
    """Return the figures of a run."""
    summary = results.summary
    refused = sum(count for name, count in summary.errors.items() if name.startswith("429"))
    failed = sum(summary.errors.values()) - refused
    waited = summary.distributions.get("ttft_s")
    return {
        "side": side,
        "load": factor,
        "good_per_s": summary.good_per_s,
        "good_of_admitted": summary.good / max(summary.sent - refused, 1),
        "good_by_fleet": "–" if by_fleet is None else percent(by_fleet),
        "refused": refused / summary.sent,
        "failed": failed,
        "ttft_p50_s": waited.p50 if waited else 0.0,
        "ttft_p99_s": waited.p99 if waited else 0.0,
    }


def shown(name: str, rows: list[dict[str, str | float]]) -> Table:
    """Return the table of one kind of fleet."""
    table = Table(
        name,
        "load",
        "good/s",
        "of admitted",
        "by the fleet",
        "refused",
        "failed",
        "TTFT p50 / p99 s",
        title="good",
    )
    for one in rows:
        table.add_row(
            str(one["side"]),
            f"{one['load']} ×",
            f"{one['good_per_s']:.3f}",
            percent(float(one["good_of_admitted"])),
            str(one["good_by_fleet"]),
            percent(float(one["refused"])),
            str(one["failed"]),
            f"{one['ttft_p50_s']:.2f} / {one['ttft_p99_s']:.2f}",
        )
    return table


def main(
    out: Annotated[Path, typer.Option(help="Folder of all results.")],
    only: Annotated[str, typer.Option(help=f"Fleets: {', '.join(KINDS)}.")] = "emulated,pair",
    beside: Annotated[Path | None, typer.Option(help="Another checkout, measured too.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second held; 0: search.")] = 0.0,
    minutes: Annotated[float, typer.Option(help="Length of the overload.")] = 5.0,
) -> None:
    """Measure goodput under overload; needs a quiet machine."""
    console = Console(soft_wrap=True)
    record: dict[str, list[dict[str, str | float]]] = {}
    for name in only.split(","):
        kind = KINDS[name]
        sides: dict[str, tuple[str, Path | None]] = {"here": (_GATE, None)}
        if beside is not None:
            sides[beside.name] = (_gate_of(beside), beside.resolve() / ".venv" / "bin" / "python")
        rows = record[name] = []
        held = rate
        if not held:
            with (
                TemporaryDirectory() as folder,
                bench_fleet(Path(folder) / "search", kind.settings + _GATE) as url,
            ):
                held = held_rate(kind, url, console)
        console.print(f"{name} holds {held:.2f} requests/s")
        for side, (gate, python) in sides.items():
            for factor in (1.0, OVERLOAD):
                lasting_s = 60 * minutes if factor > 1 else 12 * minutes
                settings = kind.settings + gate
                with (
                    TemporaryDirectory() as folder,
                    bench_fleet(Path(folder) / "overload", settings, python=python) as url,
                ):
                    results = run_at(kind, factor * held, lasting_s, url, seed=100)
                    by_fleet = good_by_fleet(url)
                where = out / f"{name}-{side}-{factor}"
                where.mkdir(parents=True, exist_ok=True)
                write_results(where, results)
                rows.append(row(side, factor, results, by_fleet))
        console.print(shown(name, rows))
        kept = float(rows[1]["good_per_s"]) / float(rows[0]["good_per_s"])
        console.print(f"good requests/s at {OVERLOAD} × ÷ at 1.0 ×: {kept:.2f} (goal {GOAL})")
    (out / "overload.json").write_text(json.dumps(record, indent=1))


def _gate_of(tree: Path) -> str:
    """Return the setting of the gate if the checkout has one."""
    file = tree / "baton" / "config" / "fleet_file.py"
    return _GATE if file.exists() and "SloConfig" in file.read_text() else ""


if __name__ == "__main__":
    typer.run(main)
