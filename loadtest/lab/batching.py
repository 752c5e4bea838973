"""Lab: static and continuous batching, for the same requests on the same engine.

Static: a batch is admitted and completed before the next. Continuous: the end of a request makes
room for the next at once.
"""

import statistics
import time
from typing import NamedTuple

import numpy as np

from baton.engine.llm import LLM
from loadtest.commands.points import measured
from loadtest.lab.driver import Driver, engine, warm
from loadtest.lab.results import Findings, Plot, Series
from loadtest.lab.table import LabContext

PROMPT_TOKENS = 32
_FIGURES = ("tok/s", "mean s", "steps")
BATCHES = (2, 4, 8, 16)
QUICK_BATCHES = (4, 8)


def run(context: LabContext) -> Findings:
    """Measure both ways for each batch size."""
    llm = engine(context, kv_blocks=512)
    warm(llm)
    answers = _answer_lengths(24 if context.quick else 64)
    batches = QUICK_BATCHES if context.quick else BATCHES
    rows = measured(batches, lambda batch: _measure(llm, answers, batch))
    gains = [row[2] / row[1] for row in rows]
    best = max(range(len(rows)), key=gains.__getitem__)
    sizes = [float(row[0]) for row in rows]
    return Findings(
        left_out=rows.left_out,
        parameters={
            "requests": len(answers),
            "prompt tokens": PROMPT_TOKENS,
            "answer tokens": f"{min(answers)} to {max(answers)}, mean {np.mean(answers):.0f}",
            "all requests": "submitted at the start",
        },
        columns=["batch", *(f"{way} {f}" for f in _FIGURES for way in ("static", "continuous"))],
        rows=[list(row) for row in rows],
        plots=[
            Plot(
                title="Output rate",
                x_label="requests in a batch",
                y_label="tokens/s",
                x=sizes,
                series=[
                    Series("static", [float(row[1]) for row in rows]),
                    Series("continuous", [float(row[2]) for row in rows]),
                ],
            ),
            Plot(
                title="Time to a complete response",
                x_label="requests in a batch",
                y_label="mean seconds",
                x=sizes,
                series=[
                    Series("static", [float(row[3]) for row in rows]),
                    Series("continuous", [float(row[4]) for row in rows]),
                ],
            ),
        ],
        sentence=f"Continuous batching gave {gains[best]:.2f} × the tokens per second of static "
        f"batches at a batch of {rows[best][0]}, in {rows[best][6]} steps instead of "
        f"{rows[best][5]}; every response was the same.",
        notes=[
            "mean s: time from the start of the run to the end of a response, over all requests.",
            "The numbers of steps do not depend on other load on the machine; the times do.",
        ],
    )


def _measure(llm: LLM, answers: list[int], batch: int) -> list[float]:
    static = _static(llm, answers, batch)
    free = _continuous(llm, answers, batch)
    if static.tokens != free.tokens:
        raise RuntimeError("static and continuous batching gave different tokens")
    rates = [sum(answers) / way.total_s for way in (static, free)]
    means = [way.mean_s for way in (static, free)]
    return [batch, *rates, *means, static.steps, free.steps]


def _answer_lengths(requests: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(16), 0.9, requests)
    return [int(length) for length in np.clip(drawn, 2, 96)]


class _Run(NamedTuple):
    total_s: float
    mean_s: float
    steps: int
    tokens: list[list[int]]


def _static(llm: LLM, answers: list[int], batch: int) -> _Run:
    driver = Driver(llm, max_batch_requests=batch)
    began_s = time.monotonic()
    ends_s = []
    for first in range(0, len(answers), batch):
        requests = [
            driver.submit(driver.prompt(PROMPT_TOKENS, first + i), answer)
            for i, answer in enumerate(answers[first : first + batch])
        ]
        driver.run()
        # Requests that end early have their end time; only their room stays unused.
        ends_s += [_end(request.ended_s) - began_s for request in requests]
    return _run_of(driver, began_s, ends_s)


def _continuous(llm: LLM, answers: list[int], batch: int) -> _Run:
    driver = Driver(llm, max_batch_requests=batch)
    began_s = time.monotonic()
    for seed, answer in enumerate(answers):
        driver.submit(driver.prompt(PROMPT_TOKENS, seed), answer)
    driver.run()
    ends_s = [_end(request.ended_s) - began_s for request in driver.requests.values()]
    return _run_of(driver, began_s, ends_s)


def _run_of(driver: Driver, began_s: float, ends_s: list[float]) -> _Run:
    tokens = [request.tokens for request in driver.requests.values()]
    return _Run(time.monotonic() - began_s, statistics.mean(ends_s), len(driver.steps), tokens)


def _end(ended_s: float | None) -> float:
    if ended_s is None:
        raise RuntimeError("a request has not ended")
    return ended_s
