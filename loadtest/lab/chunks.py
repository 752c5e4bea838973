"""Lab: effect of a prompt's chunk size on concurrent responses, and on the prompt itself."""

import statistics

from baton.engine.llm import LLM
from loadtest.commands.points import measured
from loadtest.lab.driver import Driver, engine, warm
from loadtest.lab.results import Cell, Findings, Plot, Series, shown
from loadtest.lab.table import LabContext

ANSWERS = 4
CONTEXT = 64
SIZES = (32, 64, 128, 256, 512, 1024)
QUICK_SIZES = (64, 256, 1024)


def run(context: LabContext) -> Findings:
    """Measure a long prompt beside running responses, for each chunk size."""
    llm = engine(context, kv_blocks=512)
    warm(llm)
    length, rounds = (768, 1) if context.quick else (2048, 3)
    served = _measure(llm, 512, length, rounds, bounded=True)
    rows = measured(_sizes(context), lambda size: _measure(llm, size, length, rounds))
    sizes = [float(str(row[0])) for row in rows]

    def column(index: int) -> list[float | None]:
        return [float(str(row[index])) for row in rows]

    smallest = rows[0]
    largest = rows[-1]
    return Findings(
        left_out=rows.left_out,
        parameters={
            "long prompt, tokens": length,
            "concurrent responses": ANSWERS,
            "their context, tokens": CONTEXT,
            "rounds": rounds,
        },
        columns=["chunk", "first token s", "longest ITL ms", "median ITL ms", "largest chunk"],
        rows=[*rows, ["as served", *served[1:]]],
        plots=[
            Plot(
                title="Effect on the responses",
                x_label="limit of tokens per step",
                y_label="ITL, ms",
                x=sizes,
                series=[Series("longest", column(2)), Series("median, no prompt", column(3))],
            ),
            Plot(
                title="Effect on the prompt",
                x_label="limit of tokens per step",
                y_label="first token, s",
                x=sizes,
                series=[Series("first token", column(1))],
            ),
        ],
        sentence=f"In chunks of {smallest[0]} tokens the longest ITL of a response was "
        f"{shown(smallest[2])} ms and the prompt's first token came after {shown(smallest[1])} s; "
        f"in chunks of {largest[4]}, {shown(largest[2])} ms and {shown(largest[1])} s. As served, "
        f"with a time limit: {shown(served[2])} ms and {shown(served[1])} s.",
        notes=[
            "As served: at most 512 tokens, and steps beside responses limited to 250 ms, as "
            "predicted from earlier steps. For the other rows that limit is off."
        ],
    )


def _sizes(context: LabContext) -> tuple[int, ...]:
    return QUICK_SIZES if context.quick else SIZES


def _measure(llm: LLM, size: int, length: int, rounds: int, *, bounded: bool = False) -> list[Cell]:
    first_s = []
    longest_s = []
    alone_s = []
    largest = 0
    for number in range(rounds):
        driver = Driver(llm, max_batch_requests=ANSWERS + 1, max_step_tokens=size, bounded=bounded)
        answers = [driver.submit(driver.prompt(CONTEXT, i), 2048) for i in range(ANSWERS)]
        while min(len(each.tokens) for each in answers) < 8:
            driver.step()
        alone_s += [step.seconds for step in driver.steps[-6:]]
        seen = len(driver.steps)
        long = driver.submit(driver.prompt(length, 100 + number), 1)
        while long.ended_s is None:
            driver.step()
        first_s.append(long.ttft_s)
        during = driver.steps[seen:]
        longest_s.append(max(step.seconds for step in during))
        largest = max(largest, *(step.prompt_tokens for step in during))
        for name in driver.requests:
            driver.core.scheduler.cancel(name)
        driver.core.take_events()
    median = statistics.median
    return [size, median(first_s), 1e3 * median(longest_s), 1e3 * median(alone_s), largest]
