"""Tokens/s with n-gram speculation beside the same engine without, interleaved.

    python -m benchmarks.speculation [--threads 2] [--rounds 3] [--json FILE]

The figure to read is the ratio of medians. Texts differ in how much of the answer stands in the
prompt already; at a high temperature little can be guessed, and the ratio should not fall far below
1. All contestants must give the same tokens (``numerics: exact``), or the bench fails.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.llm import DEFAULT_MODEL, LLM

_PEOPLE = ("Ada", "Alan", "Charles", "Grace", "Mary", "John")
_ROWS = "".join(f'{{"name": "{n}", "born": {1800 + 9 * i}}}\n' for i, n in enumerate(_PEOPLE * 3))
_TALE = "Write a long story about a fox who learns to fly."
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "JSON lines, greedy": (_ROWS, {}),
    "a story, greedy": (_TALE, {}),
    "a story, temperature 1": (_TALE, {"temperature": 1.0, "seed": 3}),
    "JSON lines, 16 choices": (_ROWS, {"temperature": 0.7, "seed": 3, "n": 16}),
}


@dataclass(frozen=True)
class Figure:
    """One case: medians in tokens/s, and what became of the guesses."""

    case: str
    plain_tokens_per_s: float
    speculating_tokens_per_s: float
    ratio: float
    guesses: int
    accepted: int


def measure(case: str, plain: LLM, speculating: LLM, tokens: int, rounds: int) -> Figure:
    """Both engines in turns.

    Raises:
        RuntimeError: They do not give the same tokens.
    """
    prompt, fields = CASES[case]
    speculation = speculating.core.speculation
    if speculation is None:
        raise RuntimeError("the second engine does not speculate")
    before = speculation.draft_tokens, speculation.accepted_tokens
    rates: dict[str, list[float]] = {"plain": [], "speculating": []}
    for turn in range(rounds + 1):
        answers = []
        for name, llm in (("plain", plain), ("speculating", speculating)):
            began = time.perf_counter()
            params = {"temperature": 0.0, **fields}
            outputs = llm.generate([prompt], max_tokens=tokens, ignore_eos=True, **params)
            seconds = time.perf_counter() - began
            answers.append([output.token_ids for output in outputs])
            if turn:  # the first round warms up, and finds the prompt's KV
                rates[name].append(sum(map(len, answers[-1])) / seconds)
        if answers[0] != answers[1]:
            raise RuntimeError(f"{case}: speculation shows in the tokens")
    slow, fast = statistics.median(rates["plain"]), statistics.median(rates["speculating"])
    return Figure(
        case,
        slow,
        fast,
        fast / slow,
        speculation.draft_tokens - before[0],
        speculation.accepted_tokens - before[1],
    )


def main(
    model: Annotated[str, typer.Option(help="Model reference.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions.")] = 3,
    tokens: Annotated[int, typer.Option(help="Length of the answers.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure n-gram speculation and print the ratios."""
    console = Console()
    plain = LLM(model, threads=threads)
    speculating = LLM(model, threads=threads, speculation=Speculation(NgramProposer()))
    figures = []
    for case in CASES:
        figure = measure(case, plain, speculating, tokens, rounds)
        figures.append(figure)
        share = figure.accepted / max(figure.guesses, 1)
        console.print(
            f"speculation, {case}: {figure.plain_tokens_per_s:.0f} tokens/s without, "
            f"x {figure.ratio:.2f} with n-grams ({share:.0%} of {figure.guesses} guesses right)"
        )
    if json_file is not None:
        record = {
            "model": model,
            "threads": threads,
            "numerics": "exact",
            "torch": torch.__version__,
            "figures": [asdict(figure) for figure in figures],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
