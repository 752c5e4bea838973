"""Tokens/s with n-gram speculation beside the same engine without, interleaved.

    python -m benchmarks.speculation [--threads 2] [--rounds 3] [--json FILE]

The figure to read is the ratio of medians. Texts differ in how much of the answer stands in the
prompt already; at a high temperature little can be guessed, and the ratio should not fall far below
1. All contestants must give the same tokens (``numerics: exact``), or the bench fails.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.llm import DEFAULT_MODEL, LLM
from loadtest.lab.speculation import CASES, measure


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
