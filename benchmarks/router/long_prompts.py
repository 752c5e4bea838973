"""Prompts of 60,000 tokens at rising rates, and short requests of another client beside them.

    python -m benchmarks.router.long_prompts [--rates 10,20,40,60] [--bodies fresh,growing]

Workers are emulated: all beyond one step is the router's. The first line of each kind has only
short requests; what they take longer beside long prompts is the price for other clients. The kinds
of bodies are those of ``benchmarks.router.load.LongTexts``.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.router.load import Result
from benchmarks.router.processes import (
    MODEL_NAME,
    BenchError,
    cpu_s,
    redis,
    router,
    rss_bytes,
    running,
    workers,
)
from benchmarks.router.workers import TIMING

_CONTEXT_TOKENS = 131_072
_ANSWER_TOKENS = 4
_TREE = Path(__file__).parents[2]
_COLUMNS = ("body", "rate", "req/s", "CPU ms/req", "cores", "MiB more")
_TIMES = ("TTFT p50", "p99", "short TTFT p50", "p99", "failed")


@contextlib.contextmanager
def _asking(port: int, seconds: float, **options: object) -> Iterator["subprocess.Popen[bytes]"]:
    """Run clients in a process, which have begun."""
    command = [sys.executable, "-m", "benchmarks.router.load", "--port", str(port)]
    asked = {"model": MODEL_NAME, "answer-tokens": _ANSWER_TOKENS, "seconds": seconds, **options}
    command += [f"--{option}={value}" for option, value in asked.items()]
    with running(command, stdout=subprocess.PIPE) as process:
        yield process


def _begun(process: "subprocess.Popen[bytes]") -> None:
    if process.stdout is None or process.stdout.readline() != b"begin\n":
        raise BenchError("the clients did not start")


def _seen(process: "subprocess.Popen[bytes]") -> Result:
    if process.stdout is None:
        raise BenchError("the clients have no output")
    *notes, last = process.stdout.read().decode().splitlines()
    for note in notes[:1]:
        Console().print(note[:300])
    return msgspec.json.decode(last, type=Result)


def measure(pids: list[int], port: int, body: str, rate: float, seconds: float) -> list[str]:
    """Return a line of the table: long prompts at a rate, and short ones beside them."""
    short = {"rate": 20.0, "words": 20, "warm-s": 2.0}
    with _asking(port, seconds, **short) as beside, contextlib.ExitStack() as stack:
        asking = None
        if rate:
            long = {"rate": rate, "words": 60_000, "warm-s": 2.0, "body": body}
            asking = stack.enter_context(_asking(port, seconds, **long))
            _begun(asking)
        _begun(beside)
        held_bytes = rss_bytes(*pids)
        spent_s = -cpu_s(*pids)
        time.sleep(seconds)
        spent_s += cpu_s(*pids)
        held_bytes = rss_bytes(*pids) - held_bytes
        small = _seen(beside)
        seen = _seen(asking) if asking is not None else small
    times = [seen.ttft_p50_s, seen.ttft_p99_s] if rate else [0.0, 0.0]
    times += [small.ttft_p50_s, small.ttft_p99_s]
    count = seen.requests + seen.failed
    line = [f"{count / seconds:.1f}", f"{1e3 * spent_s / max(count, 1):.1f}"]
    line += [f"{spent_s / seconds:.2f}", f"{held_bytes / 2**20:.0f}"]
    shown = [f"{1e3 * value:.1f}" for value in times]
    return [body if rate else "", f"{rate:g}", *line, *shown, f"{seen.failed + small.failed}"]


def main(
    rates: Annotated[
        str, typer.Option(help="Long prompts per second, one load each.")
    ] = "10,20,40",
    bodies: Annotated[str, typer.Option(help="Kinds of bodies.")] = "fresh,growing",
    seconds: Annotated[float, typer.Option(help="Measured time of each load.")] = 10.0,
    tree: Annotated[Path, typer.Option(help="Checkout whose router runs.")] = _TREE,
) -> None:
    """Measure the router under long prompts."""
    more = {
        "max_context_tokens": _CONTEXT_TOKENS,
        "pools": {"prefill": 0, "decode": 4, "engine": {"emulated": TIMING}},
    }
    shown = Table(title="60,000-token prompts; times in ms")
    for column in (*_COLUMNS, *_TIMES):
        shown.add_column(column, justify="right")
    with (
        redis() as url,
        workers(url, 4, 0.006, _CONTEXT_TOKENS),
        router(tree.resolve(), url, 4, more) as (pids, port),
    ):
        time.sleep(6)  # a new router has a slower tokenizer for some seconds
        for body in bodies.split(","):
            for rate in (0.0, *map(float, rates.split(","))):
                shown.add_row(*measure(pids, port, body, rate, seconds))
    Console(width=140).print(shown)


if __name__ == "__main__":
    typer.run(main)
