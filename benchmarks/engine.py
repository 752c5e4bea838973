"""Engine beside the dense program of ``dense.py``, in one process, interleaved.

    python -m benchmarks.engine [--engines exact,fast] [--threads 2] [--dtype bf16] [--rounds 5]

The machine is noisy, so read the ratio: median time of the dense program divided by the median time
of the engine (scheduler and sampling included), taken in turns. 1.0 is equal, more is faster.
Several engines can be compared: ``exact`` and ``fast``, or ``exact`` with fewer bits (``int8``,
``int4`` weights; ``+kv``: int8 KV too).

A decode step reads all weights, and the KV of each sequence. The read bound is the time of reading
as many bytes in order, with as many threads, measured in the same turns; 1.00 is as fast.
``--long`` measures 8 x 8,192 and 1 x 30,000 tokens beside this bound alone.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from baton.engine.selfcheck import DenseLlama, EngineUnderTest, ReadBound
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

PREFILLS = (512, 2048, 8192)
BATCHES = (32, 16, 4, 1)
CONTEXTS = (128, 1024)
STEPS = 6
LONG = ((8, 8192), (1, 30_000))


@dataclass(frozen=True)
class Figure:
    """Result of a case: medians in tokens/s, each engine's ratio to the dense program.

    ``bound`` is the fraction of the read bound that each engine without fewer bits reaches.
    """

    case: str
    tokens_per_s: dict[str, float]
    ratio: dict[str, float]
    bound: dict[str, float] = field(default_factory=dict)


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
        long: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._rounds = rounds
        self._console = console
        self._long = long
        self._prefills = [
            min(tokens, artifact.config.max_context_tokens - 256) for tokens in PREFILLS
        ]
        need = max(BATCHES) * (max(CONTEXTS) + 256)
        need = max(need, *(batch * (context + 512) for batch, context in long), 0)
        blocks = max(need, 2 * max(self._prefills)) // 16 + 16
        with torch.inference_mode():
            weights = load_weights(artifact, dtype)
            self._bound = ReadBound(weights, artifact.config, dtype)
            if long:
                weights = {}
            if weights:
                self._make_dense(artifact, weights)
        self._engines = {}
        for name in engines:
            numerics, kept, kv = ENGINES[name]
            engine = EngineUnderTest(artifact, dtype, numerics, blocks, kept, kv)
            self._engines[name] = engine
        self._vocab = artifact.config.vocab_size
        self.figures: list[Figure] = []

    def _make_dense(self, artifact: ModelArtifact, weights: dict[str, torch.Tensor]) -> None:
        length = max(*self._prefills, max(CONTEXTS) + STEPS + 2)
        # prefill needs a long cache for one row, decode a shorter one for many
        self._dense_long = DenseLlama(artifact.config, weights, 1, length)
        self._dense = DenseLlama(artifact.config, weights, max(BATCHES), max(CONTEXTS) + STEPS + 2)

    def run(self) -> None:
        """Measure everything; fills ``figures``."""
        for batch, context in self._long:
            for mode, engine in self._engines.items():
                warm = engine.warm(batch, context)
                self._decode(batch, context, {mode: engine}, dense=False)
                engine.cancel(warm)
                engine.step()
        if self._long:
            return
        for tokens in self._prefills:
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

    def _record(
        self,
        case: str,
        tokens: int,
        times: dict[str, list[float]],
        batch: int = 0,
        context: int = 0,
    ) -> None:
        median = {name: statistics.median(values) for name, values in times.items() if values}
        read_s = self._bound.step_s(median.pop("read", 0.0), batch, context)
        rate = {name: tokens / value for name, value in median.items()}
        engines = [name for name in self._engines if name in median]
        ratio = {name: median["dense"] / median[name] for name in engines if "dense" in median}
        whole = [name for name in engines if read_s and ENGINES[name][1:] == ("none", "")]
        bound = {name: read_s / median[name] for name in whole}
        self.figures.append(Figure(case, rate, ratio, bound))
        shown = [f"{name} {value:.0f} tokens/s" for name, value in rate.items()]
        shown += [f"{name} x {value:.2f}" for name, value in ratio.items()]
        shown += [f"{name} {value:.2f} of the read bound" for name, value in bound.items()]
        self._console.print(f"{case}: {', '.join(shown)}")

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

    def _decode(
        self,
        batch: int,
        context: int,
        engines: Mapping[str, EngineUnderTest] | None = None,
        *,
        dense: bool = True,
    ) -> None:
        engines = self._engines if engines is None else engines
        times: dict[str, list[float]] = {"read": [], "dense": [], **{mode: [] for mode in engines}}
        for turn in range(self._rounds + 1):
            tokens = torch.randint(self._vocab, (batch, 1))
            for position in range(context, context + STEPS if dense else context):
                began = time.perf_counter()
                tokens = self._dense.step(tokens, position)
                if turn:
                    times["dense"].append(time.perf_counter() - began)
            for mode, engine in engines.items():
                for _ in range(STEPS):
                    value = _timed(engine.step)
                    if turn:
                        times[mode].append(value)
            for _ in range(STEPS):
                times["read"].append(self._bound.probe_s())
        self._record(f"decode {batch} x {context}", batch, times, batch, context)


def _shown(figures: Mapping[str, float], name: str, form: str = "{:.2f}") -> str:
    return form.format(figures[name]) if name in figures else ""


def main(
    model: Annotated[str, typer.Option(help="Model reference.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    engines: Annotated[str, typer.Option(help=f"Names from {', '.join(ENGINES)}.")] = "exact,fast",
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 5,
    long: Annotated[bool, typer.Option("--long", help="Only long contexts that the model has.")] = (
        False
    ),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure the engine against a dense torch program and print the ratios."""
    torch.set_num_threads(threads)
    console = Console()
    names = engines.split(",")
    if unknown := set(names) - set(ENGINES):
        raise typer.BadParameter(f"--engines: unknown {sorted(unknown)}; use {', '.join(ENGINES)}")
    artifact = resolve_model(model)
    most = artifact.config.max_context_tokens
    cases = [(batch, min(context, most - 256)) for batch, context in LONG] if long else []
    bench = Bench(artifact, dtype, names, rounds, console, cases)
    bench.run()
    table = Table(title=f"tokens/s and ratio to the dense program; {dtype}, {threads} threads")
    whole = [name for name in names if ENGINES[name][1:] == ("none", "")]
    heads = [f"{name} ratio" for name in names]
    for column in ("case", "dense", *names, *heads, *(f"{name} of bound" for name in whole)):
        table.add_column(column, justify="left" if column == "case" else "right")
    for f in bench.figures:
        rates = (_shown(f.tokens_per_s, name, "{:.0f}") for name in ("dense", *names))
        ratios = [_shown(f.ratio, name) for name in names]
        table.add_row(f.case, *rates, *ratios, *(_shown(f.bound, name) for name in whole))
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
