"""Lab: quantised weights and KV cache: memory, speed, and perplexity."""

import math
import statistics
from pathlib import Path

import numpy as np

from baton.engine.llm import LLM
from baton.engine.loading.memory import EngineShape, footprint
from loadtest.commands.points import measured
from loadtest.lab.driver import Driver, warm
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

QUICK = (("none", "none"), ("int8", "none"), ("int4", "int8"))
VARIANTS = (*QUICK, ("none", "int8"), ("int8", "int8"), ("int4", "none"))
BATCH = 4
CONTEXT = 64
TEXT = Path(__file__).parent / "alice.txt"


def run(context: LabContext) -> Findings:
    """Measure each variant on the same text, one engine after another."""
    scored, steps = (192, 8) if context.quick else (768, 24)
    rows = measured(
        QUICK if context.quick else VARIANTS,
        lambda variant: _examine(context, *variant, scored, steps),
        at_least=2,
    )
    names = [str(row[0]) for row in rows]
    fastest = min(rows[1:], key=lambda row: float(str(row[4])))
    plain = rows[0]
    return Findings(
        left_out=rows.left_out,
        parameters={
            "text": TEXT.name,
            "tokens scored": scored,
            "batch of the decode steps": BATCH,
            "their context, tokens": CONTEXT,
        },
        columns=["weights / KV", "weights MiB", "KV bytes/token", "perplexity", "step ms"],
        rows=rows,
        plots=[
            Plot(
                title=title,
                x_label="weights / KV",
                y_label=unit,
                x=[float(index) for index in range(len(rows))],
                labels=names,
                series=[Series(unit, [float(str(row[column])) for row in rows])],
            )
            for title, unit, column in (
                ("Memory of the weights", "MiB", 1),
                ("Perplexity, lower is better", "perplexity", 3),
                (f"A decode step, batch {BATCH}", "ms", 4),
            )
        ],
        sentence=f"{fastest[0]} was the fastest quantised variant: steps of "
        f"{float(str(fastest[4])):.1f} ms instead of {float(str(plain[4])):.1f}, weights of "
        f"{float(str(fastest[1])):.0f} MiB instead of {float(str(plain[1])):.0f}, perplexity "
        f"{float(str(fastest[3])):.2f} instead of {float(str(plain[3])):.2f}.",
        notes=["`python -m benchmarks.quality` also examines long contexts and grammars."],
    )


def _examine(context: LabContext, weights: str, kv: str, scored: int, steps: int) -> list[Cell]:
    llm = LLM(context.model, weights=weights, kv=kv, threads=context.threads, kv_blocks=128)
    warm(llm)
    text = llm.tokenizer.encode(TEXT.read_text())[:scored]
    [output] = llm.generate([text], max_tokens=1, prompt_logprobs=0)
    if output.scores is None:
        raise RuntimeError("the engine gave no scores")
    logprobs = np.frombuffer(output.scores.logprobs, "<f4")
    driver = Driver(llm)
    for seed in range(BATCH):
        driver.submit(driver.prompt(CONTEXT, seed), steps + 1)
    driver.run()
    decode_s = [step.seconds for step in driver.steps if not step.prompt_tokens]
    geometry = llm.runner.geometry
    return [
        f"{weights} / {kv}",
        footprint(EngineShape(llm.artifact.config, quantisation=weights)).weights / 2**20,
        geometry.block_bytes // geometry.block_tokens,
        math.exp(-float(np.mean(logprobs))),
        1e3 * statistics.median(decode_s),
    ]
