"""What open streams hold of a router's memory.

    python -m loadtest.bench.router.streams --clients 800

Emulated workers with slow steps, a real Redis, and a router of its own; clients that all read an
answer at the same time: first half as many, then one and a half times as many. Told is how much
more the process of the router held at most, for each client more: what it has over from its start
counts in neither.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from loadtest.bench.router.load import Result
from loadtest.bench.router.processes import (
    MODEL_NAME,
    BenchError,
    redis,
    router,
    rss_bytes,
    running,
    workers,
)

_TREE = Path(__file__).resolve().parents[3]
_STEP_S = 0.25
_ANSWER_TOKENS = 90
_WORKERS = 4
_EVERY_S = 0.25


def measure(tree: Path, clients: int) -> tuple[int, int]:
    """Most bytes of the router while half as many streams were open, and half as many more."""
    with (
        redis() as url,
        workers(url, _WORKERS, _STEP_S),
        router(tree, url, _WORKERS) as (pid, port),
    ):
        time.sleep(2)
        return _most_bytes(pid, port, clients // 2), _most_bytes(pid, port, clients + clients // 2)


def _most_bytes(pid: int, port: int, clients: int) -> int:
    most = 0
    with _clients(port, clients, _ANSWER_TOKENS) as process:
        while process.poll() is None:
            most = max(most, rss_bytes(pid))
            time.sleep(_EVERY_S)
        told = process.stdout.read().decode().splitlines() if process.stdout else []
    seen = msgspec.json.decode(told[-1], type=Result) if told else None
    if seen is None or seen.failed or seen.events < clients * _ANSWER_TOKENS // 2:
        raise BenchError(f"not all streams were open: {' '.join(told)}")
    return most


def _clients(
    port: int, clients: int, tokens: int
) -> contextlib.AbstractContextManager["subprocess.Popen[bytes]"]:
    answer_s = tokens * _STEP_S
    options = {
        "port": port,
        "model": MODEL_NAME,
        "clients": clients,
        "answer-tokens": tokens,
        "warm-s": 0.5,
        "seconds": answer_s,
    }
    named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "loadtest.bench.router.load", *named]
    return running(command, stdout=subprocess.PIPE)


def main(
    clients: Annotated[int, typer.Option(help="Streams that are open at the same time.")] = 800,
    tree: Annotated[Path, typer.Option(help="The checkout of the router.")] = _TREE,
) -> None:
    """Measure once, and print what was seen."""
    few, many = measure(tree.resolve(), clients)
    each = (many - few) / clients / 1000
    typer.echo(f"{clients} more streams of up to {_ANSWER_TOKENS} tokens: {each:.1f} KB each")
    typer.echo(f"the router: {few / 1e6:.0f} MB with the others, {many / 1e6:.0f} MB with these")


if __name__ == "__main__":
    typer.run(main)
