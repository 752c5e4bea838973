"""Static against continuous batching, over the same requests and the same engine.

Static: a batch is admitted, all of it is waited for, then the next comes. Continuous: whoever ends
makes room for the next at once.
"""

import statistics
import time
from typing import NamedTuple

import numpy as np

from baton.engine.llm import LLM
from loadtest.lab.driver import Driver, warm
from loadtest.lab.results import Findings, Plot, Series
from loadtest.lab.table import LabContext

PROMPT_TOKENS = 32
_WHAT = ("tok/s", "mean s", "steps")
BATCHES = (2, 4, 8, 16)
QUICK_BATCHES = (4, 8)


def run(context: LabContext) -> Findings:
    """Both ways for each batch size."""
    llm = LLM(context.model, threads=context.threads, kv_blocks=512)
    warm(llm)
    answers = _answer_lengths(24 if context.quick else 64)
    rows: list[list[float]] = []
    for batch in QUICK_BATCHES if context.quick else BATCHES:
        static = _static(llm, answers, batch)
        free = _continuous(llm, answers, batch)
        if static.tokens != free.tokens:
            raise RuntimeError("the way of batching shows in the tokens")
        rates = [sum(answers) / way.total_s for way in (static, free)]
        means = [way.mean_s for way in (static, free)]
        rows.append([batch, *rates, *means, static.steps, free.steps])
    gains = [row[2] / row[1] for row in rows]
    best = max(range(len(rows)), key=gains.__getitem__)
    sizes = [float(row[0]) for row in rows]
    return Findings(
        parameters={
            "requests": len(answers),
            "prompt tokens": PROMPT_TOKENS,
            "answer tokens": f"{min(answers)} to {max(answers)}, mean {np.mean(answers):.0f}",
            "all requests": "there at the begin",
        },
        columns=["batch", *(f"{way} {what}" for what in _WHAT for way in ("static", "continuous"))],
        rows=[list(row) for row in rows],
        plots=[
            Plot(
                title="Tokens written a second",
                x_label="requests in a batch",
                y_label="tokens/s",
                x=sizes,
                series=[
                    Series("static", [float(row[1]) for row in rows]),
                    Series("continuous", [float(row[2]) for row in rows]),
                ],
            ),
            Plot(
                title="Until an answer is complete",
                x_label="requests in a batch",
                y_label="mean seconds",
                x=sizes,
                series=[
                    Series("static", [float(row[3]) for row in rows]),
                    Series("continuous", [float(row[4]) for row in rows]),
                ],
            ),
        ],
        sentence=f"Continuous batching wrote {gains[best]:.2f} × the tokens a second of static "
        f"batches at a batch of {rows[best][0]}, in {rows[best][6]} steps for {rows[best][5]}; "
        "every answer was the same.",
        notes=[
            "mean s: from the begin of the run to the end of an answer, over all requests.",
            "The numbers of steps do not depend on how busy the machine is; the times do.",
        ],
    )


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
        asked = [
            driver.submit(driver.prompt(PROMPT_TOKENS, first + i), answer)
            for i, answer in enumerate(answers[first : first + batch])
        ]
        driver.run()
        # Whoever ends early has an answer early: only the room stays empty.
        ends_s += [_end(each.ended_s) - began_s for each in asked]
    return _run_of(driver, began_s, ends_s)


def _continuous(llm: LLM, answers: list[int], batch: int) -> _Run:
    driver = Driver(llm, max_batch_requests=batch)
    began_s = time.monotonic()
    for seed, answer in enumerate(answers):
        driver.submit(driver.prompt(PROMPT_TOKENS, seed), answer)
    driver.run()
    ends_s = [_end(asked.ended_s) - began_s for asked in driver.requests.values()]
    return _run_of(driver, began_s, ends_s)


def _run_of(driver: Driver, began_s: float, ends_s: list[float]) -> _Run:
    tokens = [asked.tokens for asked in driver.requests.values()]
    return _Run(time.monotonic() - began_s, statistics.mean(ends_s), len(driver.steps), tokens)


def _end(ended_s: float | None) -> float:
    if ended_s is None:
        raise RuntimeError("a request has not ended")
    return ended_s
