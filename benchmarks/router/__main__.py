"""Throughput of a router for each second of CPU time, beside NVIDIA Dynamo's frontend.

    python -m benchmarks.router --build        once: Dynamo, in a separate environment
    python -m benchmarks.router [--beside TREE] [--rounds 3] [--json FILE]

Three processes: emulated workers that send one frame for each step, the router (with a real Redis
and real gRPC), and clients. Sides take turns: Baton, Dynamo with its own emulated workers if it is
built, and with ``--beside`` the router of another checkout. CPU seconds are those of the router's
process alone, or of all of them with ``--routers``, from ``/proc``. A process that takes 0.9 cores
or more is named as the limit.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from benchmarks.router import dynamo
from benchmarks.router.load import Result
from benchmarks.router.processes import (
    MODEL_NAME,
    BenchError,
    cpu_s,
    free_port,
    redis,
    router,
    rss_bytes,
    running,
    wait_for,
    workers,
)

_LIMIT = 0.9  # of a core: then a process is the bottleneck
_TREE = Path(__file__).parents[2]


class Shape(NamedTuple):
    """Size of a client's requests and responses."""

    words: int
    answer_tokens: int

    def __str__(self) -> str:
        return f"{self.words} words, {self.answer_tokens} tokens"


class Demand(NamedTuple):
    """Number of clients with one request at a time each, or rate of requests."""

    clients: int = 0
    rate_per_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate_per_s:g}/s" if self.rate_per_s else str(self.clients)


_LONG = 1000  # words from which a prompt counts as long and its response is short


class Side(NamedTuple):
    """A running router."""

    port: int
    router_pids: list[int]
    workers_pid: int
    key: str = ""
    headers: tuple[str, ...] = ()


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a side under one load; medians of the rounds.

    Attributes:
        demand: Clients, or requests per second.
        router_cores: CPU seconds of the router for each second.
        limit: Process that took a whole core; empty: none.
        stream_bytes: Additional memory of the router for each client; 0 for a rate.
    """

    side: str
    load: str
    demand: str
    requests_per_s: float
    tokens_per_s: float
    requests_per_cpu_s: float
    tokens_per_cpu_s: float
    router_cores: float
    events_per_request: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    stream_bytes: float
    failed: int
    limit: str


def measure(name: str, side: Side, shape: Shape, demand: Demand, seconds: float) -> Figures:
    """Measure one load on one side."""
    before_bytes = rss_bytes(*side.router_pids)
    command = [sys.executable, "-m", "benchmarks.router.load", "--port", str(side.port)]
    asked: dict[str, object] = {
        "words": shape.words,
        "answer-tokens": shape.answer_tokens,
        "model": MODEL_NAME,
    }
    asked |= {"clients": demand.clients, "rate": demand.rate_per_s, "seconds": seconds}
    asked |= {"key": side.key} if side.key else {}
    for option, value in asked.items():
        command += [f"--{option}", str(value)]
    for line in side.headers:
        command += ["--header", line]
    with running(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None or process.stdout.readline() != b"begin\n":
            raise RuntimeError("the clients did not start")
        spent_s = -cpu_s(*side.router_pids)
        workers_s = -cpu_s(side.workers_pid)
        time.sleep(seconds)
        spent_s += cpu_s(*side.router_pids)
        workers_s += cpu_s(side.workers_pid)
        held_bytes = rss_bytes(*side.router_pids) - before_bytes
        *notes, last = process.stdout.read().decode().splitlines()
    for note in notes:
        Console().print(note)
    seen = msgspec.json.decode(last, type=Result)
    if not seen.requests:
        raise BenchError(f"{name} served no request: {' '.join(notes) or 'no failure reported'}")
    tokens = seen.requests * shape.answer_tokens
    busy = {"router": spent_s / seconds, "workers": workers_s / seconds, "clients": seen.busy}
    return Figures(
        side=name,
        load=str(shape),
        demand=str(demand),
        requests_per_s=seen.requests / seen.seconds,
        tokens_per_s=tokens / seen.seconds,
        requests_per_cpu_s=seen.requests / spent_s,
        tokens_per_cpu_s=tokens / spent_s,
        router_cores=busy["router"],
        events_per_request=seen.events / max(seen.requests, 1),
        ttft_p50_s=seen.ttft_p50_s,
        ttft_p99_s=seen.ttft_p99_s,
        gap_p50_s=seen.gap_p50_s,
        gap_p99_s=seen.gap_p99_s,
        stream_bytes=held_bytes / demand.clients if demand.clients else 0.0,
        failed=seen.failed,
        limit=" ".join(process for process, share in busy.items() if share >= _LIMIT),
    )


@contextlib.contextmanager
def baton(tree: Path, count: int, step_s: float, routers: int) -> Iterator[Side]:
    """Run routers of a checkout, with Redis and workers."""
    with (
        redis() as url,
        workers(url, count, step_s) as workers_pid,
        router(tree, url, count, routers=routers) as (router_pids, port),
    ):
        time.sleep(6)  # a new router makes a faster tokenizer, which takes 0.6 s of the CPU
        yield Side(port, router_pids, workers_pid)


@contextlib.contextmanager
def peer(count: int) -> Iterator[Side]:
    """Run Dynamo's frontend and workers."""
    made = dynamo.Dynamo(dynamo.cache_folder(), MODEL_NAME, free_port(), count)
    try:
        wait_for(lambda: _serves(made.port), f"Dynamo ({made.log_end()})")
        frontend_pid, mocker_pid = made.pids
        yield Side(made.port, [frontend_pid], mocker_pid)
    finally:
        made.close()


def _serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
            return MODEL_NAME in answer.read().decode()
    except OSError:
        return False


def median(rounds: list[Figures]) -> Figures:
    """Return the medians of all numbers."""
    numbers = {
        name: statistics.median(getattr(figures, name) for figures in rounds)
        for name, value in msgspec.structs.asdict(rounds[0]).items()
        if isinstance(value, float)
    }
    return msgspec.structs.replace(rounds[-1], **numbers)


def table(figures: list[Figures], rounds: int) -> Table:
    """Return the table of all sides and loads."""
    shown = Table(title=f"a router's CPU second, median of {rounds}; times in ms")
    for column in (
        *(
            "side",
            "load",
            "clients or rate",
            "req/s",
            "req/CPU s",
            "tok/CPU s",
            "cores",
            "events/req",
        ),
        *("TTFT p50", "p99", "gap p50", "p99", "failed", "limit"),
    ):
        shown.add_column(column, justify="left" if column in ("side", "load", "limit") else "right")
    for f in figures:
        times = (f.ttft_p50_s, f.ttft_p99_s, f.gap_p50_s, f.gap_p99_s)
        shown.add_row(
            f.side,
            f.load,
            f.demand,
            f"{f.requests_per_s:.0f}",
            f"{f.requests_per_cpu_s:.0f}",
            f"{f.tokens_per_cpu_s:.0f}",
            f"{f.router_cores:.2f}",
            f"{f.events_per_request:.1f}",
            *(f"{1e3 * value:.1f}" for value in times),
            str(f.failed),
            f.limit,
        )
    return shown


def main(
    clients: Annotated[str, typer.Option(help="Numbers of connections, one load each.")] = "64,256",
    rates: Annotated[str, typer.Option(help="Requests per second, one load each.")] = "50",
    seconds: Annotated[float, typer.Option(help="Measured time of each load.")] = 8.0,
    rounds: Annotated[int, typer.Option(help="Rounds in turns; medians are shown.")] = 3,
    count: Annotated[int, typer.Option("--workers", help="Emulated workers.")] = 4,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds between steps.")] = 0.006,
    beside: Annotated[Path | None, typer.Option(help="Another checkout, measured too.")] = None,
    routers: Annotated[int, typer.Option(help="Baton's routers behind one port.")] = 1,
    words: Annotated[str, typer.Option(help="Words of prompts, one load each.")] = "20,3000",
    build: Annotated[bool, typer.Option("--build", help="Install Dynamo first.")] = False,
    with_peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Dynamo, if built.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure routers and print their throughput for a second of CPU time."""
    console = Console(width=max(Console().width, 150))
    if build:
        dynamo.build(dynamo.cache_folder(), DEFAULT_MODEL, console)
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[Side]]] = {
        "baton": lambda: baton(_TREE, count, step_s, routers)
    }
    if beside is not None:
        other = beside.resolve()
        sides[str(beside)] = lambda: baton(other, count, step_s, routers)
    if with_peer:
        sides[f"dynamo {dynamo.VERSION}"] = lambda: peer(count)
    shapes = [Shape(n, 16 if n >= _LONG else 64) for n in map(int, words.split(","))]
    demands = [Demand(clients=number) for number in map(int, clients.split(",")) if number]
    demands += [Demand(rate_per_s=rate) for rate in map(float, rates.split(",")) if rate]
    seen: dict[tuple[str, Shape, Demand], list[Figures]] = defaultdict(list)
    for _ in range(rounds):
        for name, side in list(sides.items()):
            try:
                with side() as up:
                    for shape in shapes:
                        for demand in demands:
                            figures = measure(name, up, shape, demand, seconds)
                            seen[name, shape, demand].append(figures)
            except dynamo.PeerError as error:
                console.print(f"{name}: not run ({error})")
                del sides[name]
    order = sorted(seen, key=lambda key: (key[1], key[2]))
    medians = [median(seen[key]) for key in order]
    console.print(table(medians, rounds))
    if json_file is not None:
        python = sys.version.split()[0]
        machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "python": python}
        built = [msgspec.structs.asdict(figures) for figures in medians]
        text = json.dumps({"machine": machine, "step_s": step_s, "figures": built}, indent=1)
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
