"""Lab: time to first token of prompts with a cached prefix, and without."""

import random
import statistics
from importlib.resources import files

from loadtest.commands.points import measured
from loadtest.lab.asking import Fleet
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

WORDS = (files("loadtest") / "workloads" / "words.txt").read_text().split()
SIZES = (128, 512, 1024, 2048)
QUICK_SIZES = (128, 512)


def run(context: LabContext) -> Findings:
    """Send a long prefix with a short question, then the same prefix with another question."""
    rounds = 3 if context.quick else 5
    with Fleet(context) as fleet:
        fleet.stream("hello", 2)  # connects, and warms up
        sizes = QUICK_SIZES if context.quick else SIZES
        rows = measured(sizes, lambda words: _measure(fleet, words, rounds))
    lengths = [float(str(row[0])) for row in rows]
    cold = [float(str(row[2])) for row in rows]
    cached_ms = [float(str(row[3])) for row in rows]
    return Findings(
        left_out=rows.left_out,
        parameters={
            "rounds": rounds,
            "prefix": "random words, new in each round",
            "question": "four other words",
            "placement": "the router's own choice",
        },
        columns=["prompt tokens", "cached tokens", "uncached ms", "cached ms", "uncached ÷ cached"],
        rows=rows,
        plots=[
            Plot(
                title="Time to first token",
                x_label="tokens of the prompt",
                y_label="ms",
                x=lengths,
                series=[Series("uncached", list(cold)), Series("cached", list(cached_ms))],
            )
        ],
        sentence=f"With {rows[-1][1]} of {rows[-1][0]} tokens cached the first token came after "
        f"{cached_ms[-1]:.0f} ms instead of {cold[-1]:.0f}: {cold[-1] / cached_ms[-1]:.1f} × "
        "faster.",
        notes=["Medians over the rounds, one request at a time, measured by the client."],
    )


def _measure(fleet: Fleet, words: int, rounds: int) -> list[Cell]:
    cold = []
    warm = []
    prompts = []
    cached = []
    draw = random.SystemRandom()  # avoids the words of earlier runs
    for _ in range(rounds):
        prefix = " ".join(draw.choices(WORDS, k=words))
        first = fleet.stream(f"{prefix}\n{' '.join(draw.choices(WORDS, k=4))}", 2)
        again = fleet.stream(f"{prefix}\n{' '.join(draw.choices(WORDS, k=4))}", 2)
        cold.append(first.ttft_s)
        warm.append(again.ttft_s)
        prompts.append(again.prompt_tokens)
        cached.append(again.cached_tokens)
    median = statistics.median
    times = [1e3 * median(cold), 1e3 * median(warm)]
    return [round(median(prompts)), round(median(cached)), *times, times[0] / times[1]]
