"""What open streams hold of a router's memory.

    python -m benchmarks.router.streams --clients 800

Emulated workers with slow steps, a real Redis, and a router of its own; clients that all read an
answer at the same time: first half as many, then one and a half times as many. Told is how much
more the process of the router held, for each client more: what it has over from its start counts in
neither. Once while every client reads its first answer, so that none has ended; and at most, when
each has one that has ended, too, of which the router keeps a record.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.router.load import Result
from benchmarks.router.processes import (
    MODEL_NAME,
    BenchError,
    redis,
    router,
    rss_bytes,
    running,
    workers,
)

_TREE = Path(__file__).resolve().parents[2]
_STEP_S = 0.25
_ANSWER_TOKENS = 90
_WORKERS = 4
_EVERY_S = 0.25


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the router: while no stream had ended, and at most."""

    open_bytes: int
    most_bytes: int


def measure(tree: Path, clients: int) -> tuple[Held, Held]:
    """With half as many streams as clients, and with half as many more."""
    with (
        redis() as url,
        workers(url, _WORKERS, _STEP_S),
        router(tree, url, _WORKERS) as (pid, port),
    ):
        time.sleep(2)
        return _held(pid, port, clients // 2), _held(pid, port, clients + clients // 2)


def _held(pid: int, port: int, clients: int) -> Held:
    most = first = 0
    first_end_s = time.monotonic() + _ANSWER_TOKENS * _STEP_S  # later: they have yet to begin
    with _clients(port, clients, _ANSWER_TOKENS) as process:
        while process.poll() is None:
            most = max(most, rss_bytes(pid))
            first = most if time.monotonic() < first_end_s else first
            time.sleep(_EVERY_S)
        told = process.stdout.read().decode().splitlines() if process.stdout else []
    seen = msgspec.json.decode(told[-1], type=Result) if told else None
    if seen is None or seen.failed or seen.events < clients * _ANSWER_TOKENS // 2:
        raise BenchError(f"not all streams were open: {' '.join(told)}")
    return Held(open_bytes=first, most_bytes=most)


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
    command = [sys.executable, "-m", "benchmarks.router.load", *named]
    return running(command, stdout=subprocess.PIPE)


def main(
    clients: Annotated[int, typer.Option(help="Streams that are open at the same time.")] = 800,
    tree: Annotated[Path, typer.Option(help="The checkout of the router.")] = _TREE,
) -> None:
    """Measure once, and print what was seen."""
    few, many = measure(tree.resolve(), clients)
    typer.echo(f"{clients} more streams of up to {_ANSWER_TOKENS} tokens")
    for name, before, after in (
        ("while none has ended", few.open_bytes, many.open_bytes),
        ("at most, with those that have ended", few.most_bytes, many.most_bytes),
    ):
        each_kb = (after - before) / clients / 1000
        sizes = f"{before / 1e6:.0f} MB with the others, {after / 1e6:.0f} MB with these"
        typer.echo(f"{name}: {each_kb:.1f} KB each ({sizes})")


if __name__ == "__main__":
    typer.run(main)
