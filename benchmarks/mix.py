"""What steps lose when they mix work: many short prompts at once, and a prompt beside decodes.

    python -m benchmarks.mix [--threads 2] [--rounds 5]

One engine (``exact``, bf16), all cases in turns, medians over rounds. Each case stands beside the
time of its parts alone: 1.0 is as fast as the parts one after the other, above is slower.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from baton.engine.selfcheck.engine_under_test import EngineUnderTest
from rich.console import Console
from rich.table import Table

from baton.engine.llm import DEFAULT_MODEL
from baton.model.artifact import resolve_model

SHORT, SHORTS = 64, 8
LONG, BATCH, CONTEXT = 1024, 16, 128
STEPS = 12


class Mix:
    """All cases over one engine; times in seconds."""

    def __init__(self, model: str) -> None:
        self._engine = EngineUnderTest(resolve_model(model), "bf16", "exact", blocks=2048)

    def _drain(self) -> list[float]:
        """The time of each step until nothing is left."""
        times = []
        while self._engine.core.batch.has_work():
            times.append(_seconds(self._engine.step))
        return times

    def prompts(self, count: int, tokens: int) -> float:
        """So many prompts that are there at once."""
        for _ in range(count):
            self._engine.submit(tokens, max_tokens=1)
        return sum(self._drain())

    def decode_step(self) -> float:
        """A step of the batch that decodes alone."""
        names = self._engine.warm(BATCH, CONTEXT)
        times = [_seconds(self._engine.step) for _ in range(STEPS)]
        self._engine.cancel(names)
        return statistics.median(times)

    def beside(self) -> list[float]:
        """Each step from a long prompt's arrival beside the batch until its first token."""
        names = self._engine.warm(BATCH, CONTEXT)
        self._engine.submit(LONG, max_tokens=1)
        times = []
        while len(self._engine.core.batch.running) > BATCH or self._engine.core.batch.queue:
            times.append(_seconds(self._engine.step))
        self._engine.cancel(names)
        return times


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(
    model: Annotated[str, typer.Option()] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Run all cases; alone on the machine."""
    torch.set_num_threads(threads)
    mix = Mix(model)
    mix.prompts(2, LONG)
    found = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        found["short"].append(mix.prompts(1, SHORT))
        found["as long"].append(mix.prompts(1, SHORT * SHORTS))
        found["shorts"].append(mix.prompts(SHORTS, SHORT))
        found["long"].append(mix.prompts(1, LONG))
        found["decode"].append(mix.decode_step())
        steps = mix.beside()
        found["beside"].append(sum(steps))
        found["steps"].append(len(steps))
        found["longest"].append(max(steps))
    s = {name: statistics.median(values) for name, values in found.items()}
    table = Table("case", "ms", "beside", "ratio", title=f"bf16, {threads} threads")

    def row(case: str, seconds: float, parts: str, parts_s: float) -> None:
        ratio = f"{seconds / parts_s:.2f}"
        table.add_row(case, f"{1e3 * seconds:.0f}", f"{parts}: {1e3 * parts_s:.0f}", ratio)

    shorts = f"{SHORTS} prompts of {SHORT} at once"
    row(shorts, s["shorts"], "one after the other", SHORTS * s["short"])
    row(shorts, s["shorts"], f"one of {SHORTS * SHORT}", s["as long"])
    mixed = f"{s['steps']:.0f} steps of {BATCH} decodes with a prompt of {LONG}"
    row(mixed, s["beside"], "prompt and steps alone", s["long"] + s["steps"] * s["decode"])
    row("longest of these steps", s["longest"], "a step of decodes alone", s["decode"])
    Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    typer.run(main)
