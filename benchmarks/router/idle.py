"""What workers that have nothing to do cost a router.

    python -m benchmarks.router.idle --workers 300,1000

Emulated workers in one process, a real Redis, and a router of its own: CPU seconds of that router,
while nobody asks anything. A worker at rest is sent a heartbeat every 37 to 50 s: measure for twice
that long at least.
"""

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.router.processes import cpu_s, redis, router, wait_for, workers

_TREE = Path(__file__).resolve().parents[2]
_MOST_OF_A_POOL = 512  # that the fleet file may name; the router takes whoever is there
_START_LIMIT_S = 180.0
_SETTLE_S = 8.0  # until bookkeeping of the beginning is over


def measure(tree: Path, count: int, seconds: float) -> float:
    """Cores that the router of a checkout takes beside so many idle workers."""
    named = min(count, _MOST_OF_A_POOL)
    with redis() as url, workers(url, count, 0.25), router(tree, url, named) as (pid, port):
        wait_for(lambda: _ready(port) >= count, f"{count} workers", _START_LIMIT_S)
        time.sleep(_SETTLE_S)
        began_s, spent_s = time.monotonic(), -cpu_s(pid)
        time.sleep(seconds)
        return (spent_s + cpu_s(pid)) / (time.monotonic() - began_s)


def _ready(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/fleet", timeout=5) as answer:
            found = json.load(answer)["workers"]
    except OSError:
        return 0
    return sum(worker["state"] == "ready" for worker in found)


def main(
    count: Annotated[str, typer.Option("--workers", help="One number for each run.")] = "300,1000",
    seconds: Annotated[float, typer.Option(help="That are measured.")] = 100.0,
    tree: Annotated[Path, typer.Option(help="The checkout of the router.")] = _TREE,
) -> None:
    """Measure, and print one line for each number of workers."""
    for number in map(int, count.split(",")):
        cores = measure(tree.resolve(), number, seconds)
        each_us = 1e6 * cores / number
        typer.echo(
            f"{number:6} idle workers: {100 * cores:5.1f} % of a core, {each_us:.0f} us each"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
