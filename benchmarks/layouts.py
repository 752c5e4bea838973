"""Comparison of disaggregated, colocated and `auto` serving on the same machine and loads.

    python -m benchmarks.layouts --out DIR [--seeds 3] [--requests 40] [--trace FILE]

- ``disaggregated``: one prefill and one decode worker, each pinned to half of the cores
- ``auto``: the same two workers, and the router chooses for every request
- ``colocated``: one worker with all the cores

Every load is sent to all of them with the same seeds, in alternating order, each time to a fresh
server with an empty cache. Each run leaves its results.json in DIR; the table has medians over
seeds. Where ``llama-server`` is built (``benchmarks.llamacpp --build``), it is a fourth column with
the same weights.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from baton.engine.llm import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from benchmarks.llamacpp import Peer, PeerError, cache_folder
from benchmarks.router.processes import free_port
from loadtest.client.records import ServerOptions
from loadtest.client.server import Server
from loadtest.commands.running import ended_by_signals
from loadtest.metrics.summary import LatencyGoals
from loadtest.results.files import Results, write_results
from loadtest.run import RunOptions, run_plan
from loadtest.workloads.plan import Plan
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan
from loadtest.workloads.traces import read_trace

TRACES = Path(__file__).parents[1] / "loadtest" / "traces"
SLO = LatencyGoals(ttft_s=2.0, tpot_s=0.1)
START_LIMIT_S = 180.0
FIGURES: dict[str, Callable[[Results], float | None]] = {
    "TTFT p50 s": lambda run: _at(run, "ttft_s", "p50"),
    "TTFT p99 s": lambda run: _at(run, "ttft_s", "p99"),
    "ITL p99 s": lambda run: _at(run, "itl_s", "p99"),
    "worst tenth of gaps, p50 s": lambda run: _at(run, "itl_worst_tenth_s", "p50"),
    "longest gap, p99 s": lambda run: _at(run, "itl_longest_s", "p99"),
    "tokens/s": lambda run: run.summary.answer_tokens_per_s,
    "good of sent": lambda run: run.summary.attainment,
    "good requests/s": lambda run: run.summary.good_per_s,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to divide the machine."""

    name: str
    server: str
    headers: dict[str, str]


LAYOUTS = (
    Layout(name="disaggregated", server="pair", headers={"x-baton-mode": "disaggregated"}),
    Layout(name="auto", server="pair", headers={"x-baton-mode": "auto"}),
    Layout(name="colocated", server="one", headers={"x-baton-mode": "auto"}),
)
PEER = Layout(name="llama-server", server="llama", headers={})


def loads(requests: int, rate: float, seed: int) -> dict[str, Plan]:
    """Return the loads of one seed: two traces, scaled down, and long prompts among short ones."""
    plans = {
        "conversation ÷ 32": _trace_plan("mooncake_conversation.jsonl", 32, requests, rate, seed),
        "Azure conversation ÷ 8": _trace_plan("azure_conv_2023.csv", 8, requests, rate, seed),
    }
    load = OpenLoop(
        requests=requests,
        rate=rate,
        prompt_tokens="uniform:32-96",
        answer_tokens="uniform:24-48",
        long_every=8,
        long_tokens=1024,
    )
    plans["a long prompt every 8"] = open_loop_plan(load, name="interference", seed=seed)
    return plans


def _trace_plan(file: str, shrink: float, requests: int, rate: float, seed: int) -> Plan:
    """Return a part of a trace for each seed, paced so that the whole has this mean rate."""
    rows = read_trace(TRACES / file)
    begin = seed * requests % (len(rows) - requests)
    part = rows[begin : begin + requests]
    first_s = rows[begin].arrival_s
    moved = [row._replace(arrival_s=row.arrival_s - first_s) for row in part]
    speed = rate * rows[-1].arrival_s / len(rows)
    return replay_plan(moved, name=file, speed=speed, shrink=shrink, seed=seed)


@contextlib.contextmanager
def bench_fleet(
    folder: Path,
    settings: str,
    *,
    model: str | None = DEFAULT_MODEL,
    context: int = 4096,
    python: Path | None = None,
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[str]:
    """Start a fresh fleet, by the interpreter of another checkout if given; yield its URL.

    Without a ``model``, ``settings`` has ``models``.
    """
    folder.mkdir(parents=True)
    port = free_port()
    settings += f"model: {model}\n" if model else ""
    (folder / "fleet.yaml").write_text(
        f"fleet: bench-{folder.name}\nport: {port}\nmax_context_tokens: {context}\n{settings}"
    )
    command = [str(python or sys.executable), "-m", "fleet.cli.main", "up"]
    command.append(str(folder / "fleet.yaml"))
    url = f"http://127.0.0.1:{port}"
    home = {"BATON_HOME": str(folder / "home")}
    with _server_process(command, folder, home, f"{url}/health/ready", start_limit_s):
        yield url


@contextlib.contextmanager
def _fleet(folder: Path, *, pair: bool, pinned: bool) -> Iterator[str]:
    cores = os.cpu_count() or 1
    pools, threads = ((1, 1), str(max(cores // 2, 1))) if pair else ((0, 1), str(cores))
    if pair and not pinned:
        threads = "auto"
    settings = (
        f"pools: {{prefill: {pools[0]}, decode: {pools[1]}}}\nthreads_per_rank: {threads}\n"
        "kv_blocks_per_worker: 1024\n"
    )
    with bench_fleet(folder, settings) as url:
        if pinned:
            _pin(url, cores)
        yield url


@contextlib.contextmanager
def llama_server(
    folder: Path, *more: str, model: str = DEFAULT_MODEL, slots: int = 32, context: int = 131_072
) -> Iterator[str]:
    """Start llama-server with the same weights in bf16; yield its URL.

    ``context`` is that of all slots together; ``more`` are further arguments.
    """
    folder.mkdir(parents=True)
    peer = Peer(cache_folder())
    port = free_port()
    cores = str(os.cpu_count() or 1)
    source = resolve_model(model).path
    arguments = ("-m", str(peer.bf16_model(source)), "-t", cores, "-tb", cores, "-np", str(slots))
    where = ("-c", str(context), "--host", "127.0.0.1", "--port", str(port))
    command = [str(peer.programs / "llama-server"), *arguments, *where, *more]
    url = f"http://127.0.0.1:{port}"
    with _server_process(command, folder, peer.environment, f"{url}/health"):
        yield url


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[str]]] = {
    "pair": lambda folder: _fleet(folder, pair=True, pinned=True),
    "lending": lambda folder: _fleet(folder, pair=True, pinned=False),
    "one": lambda folder: _fleet(folder, pair=False, pinned=False),
    "llama": llama_server,
}
"""Functions that start a server in a new folder, and yield its URL."""


def columns(console: Console, layouts: Sequence[Layout] = LAYOUTS) -> list[Layout]:
    """Return the layouts, and llama-server where it is built; print if it is missing."""
    try:
        Peer(cache_folder())
    except PeerError as missing:
        console.print(f"llama-server: not run ({missing})")
        return list(layouts)
    return [*layouts, PEER]


@contextlib.contextmanager
def _server_process(
    command: Sequence[str],
    folder: Path,
    more: dict[str, str],
    ready: str,
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[None]:
    with ended_by_signals(), (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            until_s = time.monotonic() + start_limit_s
            while not _answers(ready):
                if process.poll() is not None or time.monotonic() > until_s:
                    output = (folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{' '.join(command)} is not ready; its output:\n{output}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _pin(url: str, cores: int) -> None:
    halves = {"prefill": range(cores // 2), "decode": range(cores // 2, cores)}
    for worker in httpx.get(f"{url}/fleet", timeout=10, trust_env=False).json()["workers"]:
        engine = psutil.Process(worker["pid"])
        for process in (engine, *engine.children(recursive=True)):
            process.cpu_affinity(list(halves[worker["role"]]) or [0])
            for thread in process.threads():  # existing threads keep their own affinity
                os.sched_setaffinity(thread.id, list(halves[worker["role"]]) or [0])


def run_whole(plan: Plan, options: RunOptions) -> Results:
    """Run a plan to its end.

    Raises:
        KeyboardInterrupt: A signal ended it early.
    """
    results = run_plan(plan, options)
    if not results.complete:
        raise KeyboardInterrupt
    return results


def run_one(plan: Plan, url: str, layout: Layout, folder: Path) -> Results:
    """Run one load against one layout; write its results into the folder."""
    with Server(url, "") as server:
        wanted = ServerOptions(
            url=server.url, model=server.first_model(), ignore_eos=True, headers=layout.headers
        )
        options = RunOptions(server=server.settle(wanted), slo=SLO)
    results = run_whole(plan, options)
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, results)
    return results


def _at(run: Results, name: str, field: str) -> float | None:
    distribution = run.summary.distributions.get(name)
    return None if distribution is None else float(getattr(distribution, field))


def measure(
    *, out: Path, seeds: int, requests: int, rate: float, only: str, console: Console
) -> dict[str, dict[str, list[Results]]]:
    """Run everything, one server at a time; return the results by load and layout."""
    layouts = [layout for layout in columns(console) if only in ("", layout.name)]
    found: dict[str, dict[str, list[Results]]] = {}
    for seed in range(seeds):
        for layout in layouts if seed % 2 == 0 else reversed(layouts):
            start = SERVERS[layout.server]
            with TemporaryDirectory() as folder, start(Path(folder) / layout.server) as url:
                for what, plan in loads(requests, rate, seed).items():
                    where = out / f"{what.replace(' ', '-')}-{layout.name}-{seed}"
                    run = run_one(plan, url, layout, where)
                    found.setdefault(what, {}).setdefault(layout.name, []).append(run)
                    console.print(f"{what}, seed {seed}, {layout.name}: {run.summary.ends}")
    return found


def medians(runs: Sequence[Results]) -> dict[str, float | None]:
    """Return every figure's median over seeds."""
    rows = {}
    for name, figure in FIGURES.items():
        values = [value for run in runs if (value := figure(run)) is not None]
        rows[name] = statistics.median(values) if values else None
    return rows


def main(
    out: Annotated[Path, typer.Option(help="Folder of all results.")],
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    requests: Annotated[int, typer.Option(min=1, max=200, help="Requests of each run.")] = 40,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    only: Annotated[str, typer.Option(help="Layout to run; by default all.")] = "",
) -> None:
    """Compare the layouts; nothing else may run on the machine."""
    console = Console(soft_wrap=True)
    found = measure(out=out, seeds=seeds, requests=requests, rate=rate, only=only, console=console)
    record: dict[str, Any] = {}
    for load, columns in found.items():
        record[load] = {name: medians(runs) for name, runs in columns.items()}
        table = Table(load, *columns)
        for figure in FIGURES:
            cells = (record[load][name][figure] for name in columns)
            table.add_row(figure, *("–" if cell is None else f"{cell:.3g}" for cell in cells))
        console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "layouts.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    typer.run(main)
