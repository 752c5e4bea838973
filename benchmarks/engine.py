"""Engine beside the dense program of ``dense.py``, in one process, interleaved.

    python -m benchmarks.engine [--engines exact,fast] [--threads 2] [--dtype bf16] [--rounds 5]

The machine is noisy, so read the ratio: median time of the dense program divided by the median time
of the engine (scheduler and sampling included), taken in turns. 1.0 is equal, more is faster.
Several engines can be compared: ``exact`` and ``fast``, or ``exact`` with fewer bits (``int8``,
``int4`` weights; ``+kv``: int8 KV too).
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.engine.llm import DEFAULT_MODEL
from baton.engine.loading.open import load_weights
from baton.engine.numerics import Numerics
from baton.engine.selfcheck.dense import DenseLlama
from baton.engine.selfcheck.engine_under_test import EngineUnderTest
from baton.model.artifact import ModelArtifact, resolve_model

ENGINES: dict[str, tuple[Numerics, str, str]] = {
    "exact": ("exact", "none", ""),
    "fast": ("fast", "none", ""),
    "int8": ("exact", "int8", ""),
    "int4": ("exact", "int4", ""),
    "kv": ("exact", "none", "int8"),
    "int8+kv": ("exact", "int8", "int8"),
    "int4+kv": ("exact", "int4", "int8"),
}
"""Numerics, weights and KV of each engine by name; no KV: same as the activations."""

PREFILLS = (512, 2048)
BATCHES = (32, 16, 4, 1)
CONTEXTS = (128, 1024)
STEPS = 6


@dataclass(frozen=True)
class Figure:
    """Result of a case: medians in tokens/s, and each engine's ratio to the dense program."""

    case: str
    tokens_per_s: dict[str, float]
    ratio: dict[str, float]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    """All engines, and the dense program, over one model."""

    def __init__(
        self,
        artifact: ModelArtifact,
        dtype: str,
        engines: Sequence[str],
        rounds: int,
        console: Console,
    ) -> None:
        self._rounds = rounds
        self._console = console
        need = max(BATCHES) * (max(CONTEXTS) + 256)
        blocks = max(need, 2 * max(PREFILLS)) // 16 + 16
        with torch.inference_mode():
            weights = load_weights(artifact, dtype)
            length = max(*PREFILLS, max(CONTEXTS) + STEPS + 2)
            # prefill needs a long cache for one row, decode a shorter one for many
            self._dense_long = DenseLlama(artifact.config, weights, 1, length)
            self._dense = DenseLlama(
                artifact.config, weights, max(BATCHES), max(CONTEXTS) + STEPS + 2
            )
        self._engines = {}
        for name in engines:
            numerics, kept, kv = ENGINES[name]
            engine = EngineUnderTest(artifact, dtype, numerics, blocks, kept, kv)
            self._engines[name] = engine
        self._vocab = artifact.config.vocab_size
        self.figures: list[Figure] = []

    def run(self) -> None:
        """Measure everything; fills ``figures``."""
        for tokens in PREFILLS:
            self._prefill(tokens)
        for context in CONTEXTS:
            names = {
                mode: engine.warm(max(BATCHES), context) for mode, engine in self._engines.items()
            }
            for batch in BATCHES:
                for mode, engine in self._engines.items():
                    engine.cancel(names[mode][batch:])
                    names[mode] = names[mode][:batch]
                    engine.step()
                self._decode(batch, context)
            for mode, engine in self._engines.items():
                engine.cancel(names[mode])

    def _record(self, case: str, tokens: int, times: dict[str, list[float]]) -> None:
        median = {name: statistics.median(values) for name, values in times.items()}
        rate = {name: tokens / value for name, value in median.items()}
        ratio = {name: median["dense"] / median[name] for name in self._engines}
        self.figures.append(Figure(case, rate, ratio))
        found = ", ".join(f"{name} x {value:.2f}" for name, value in ratio.items())
        self._console.print(f"{case}: dense {rate['dense']:.0f} tokens/s, {found}")

    def _prefill(self, tokens: int) -> None:
        prompt = torch.randint(self._vocab, (1, tokens))
        times: dict[str, list[float]] = {"dense": [], **{mode: [] for mode in self._engines}}
        for turn in range(self._rounds + 1):
            rates = {"dense": _timed(lambda: self._dense_long.step(prompt, 0))}
            for mode, engine in self._engines.items():
                rates[mode] = _timed(partial(engine.prefill, tokens))
            if turn:  # the first round warms caches and the allocator
                for name, value in rates.items():
                    times[name].append(value)
        self._record(f"prefill {tokens}", tokens, times)

    def _decode(self, batch: int, context: int) -> None:
        times: dict[str, list[float]] = {"dense": [], **{mode: [] for mode in self._engines}}
        for turn in range(self._rounds + 1):
            tokens = torch.randint(self._vocab, (batch, 1))
            for position in range(context, context + STEPS):
                began = time.perf_counter()
                tokens = self._dense.step(tokens, position)
                if turn:
                    times["dense"].append(time.perf_counter() - began)
            for mode, engine in self._engines.items():
                for _ in range(STEPS):
                    value = _timed(engine.step)
                    if turn:
                        times[mode].append(value)
        self._record(f"decode {batch} x {context}", batch, times)


def main(
    model: Annotated[str, typer.Option(help="Model reference.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    engines: Annotated[str, typer.Option(help=f"Names from {', '.join(ENGINES)}.")] = "exact,fast",
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure the engine against a dense torch program and print the ratios."""
    torch.set_num_threads(threads)
    console = Console()
    names = engines.split(",")
    if unknown := set(names) - set(ENGINES):
        raise typer.BadParameter(f"--engines: unknown {sorted(unknown)}; use {', '.join(ENGINES)}")
    bench = Bench(resolve_model(model), dtype, names, rounds, console)
    bench.run()
    table = Table(title=f"tokens/s and ratio to the dense program; {dtype}, {threads} threads")
    for column in ("case", "dense", *names, *(f"{name} ratio" for name in names)):
        table.add_column(column, justify="left" if column == "case" else "right")
    for f in bench.figures:
        rates = (f"{rate:.0f}" for rate in f.tokens_per_s.values())
        table.add_row(f.case, *rates, *(f"{ratio:.2f}" for ratio in f.ratio.values()))
    console.print(table)
    if json_file is not None:
        record = {
            "model": model,
            "dtype": dtype,
            "threads": threads,
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
            "torch": torch.__version__,
            "figures": [asdict(figure) for figure in bench.figures],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
