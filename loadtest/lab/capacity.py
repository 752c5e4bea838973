"""Lab: how many requests fit, predicted and measured on a real engine.

Predicted as in `baton capacity`: blocks per request, and bytes of the process. Measured with more
and more concurrent requests: how many ran together, and when the engine began to preempt.
"""

import psutil

from baton.engine.core.sequence import blocks_for
from baton.engine.llm import LLM
from baton.engine.loading.memory import EngineShape, footprint
from loadtest.commands.points import measured
from loadtest.lab.driver import Driver, engine, warm
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

PROMPT_TOKENS = 32
ANSWER_TOKENS = 48
_MIB = 1 << 20


def run(context: LabContext) -> Findings:
    """Measure one pool with more and more requests."""
    blocks = 30 if context.quick else 100
    llm = engine(context, kv_blocks=blocks)
    warm(llm)
    request_blocks = blocks_for(PROMPT_TOKENS + ANSWER_TOKENS)
    predicted = blocks // request_blocks
    counts = sorted(
        {1, predicted // 2, predicted, predicted + 1, predicted + 2, 2 * predicted} - {0}
    )
    rows = measured(counts, lambda count: _measure(llm, count))
    began = next((int(str(row[0])) for row in rows if row[3]), None)
    longest = _longest_accepted(llm, blocks * 16)
    need = footprint(EngineShape(llm.artifact.config, max_batch_requests=2 * predicted))
    predicted_mib = (need.total + llm.runner.geometry.pool_bytes) / _MIB
    measured_mib = psutil.Process().memory_info().rss / _MIB
    return Findings(
        left_out=rows.left_out,
        parameters={
            "pool, blocks of 16 tokens": blocks,
            "prompt and output tokens": f"{PROMPT_TOKENS} and {ANSWER_TOKENS}",
            "blocks of a request, predicted": request_blocks,
            "requests that fit, predicted": predicted,
            "memory predicted, MiB": predicted_mib,
            "memory of the process at the end, MiB": measured_mib,
            "longest request predicted, tokens": blocks * 16,
            "longest request accepted, tokens": longest,
        },
        columns=["requests", "max running", "max blocks", "preemptions", "tok/s", "max TTFT s"],
        rows=rows,
        plots=[
            Plot(
                title="Blocks in use, and requests preempted",
                x_label="concurrent requests",
                y_label="blocks | preemptions",
                x=[float(str(row[0])) for row in rows],
                series=[
                    Series("max blocks in use", [float(str(row[2])) for row in rows]),
                    Series("preemptions", [float(str(row[3])) for row in rows]),
                    Series("pool", [float(blocks)] * len(rows)),
                ],
                caption=f"Predicted to fit: {predicted} requests.",
            )
        ],
        sentence=f"{predicted} requests were predicted to fit; the engine "
        + (f"first preempted at {began}" if began else f"never preempted up to {rows[-1][0]}")
        + f", and accepted requests of up to {longest} tokens ({blocks * 16} predicted). "
        f"Memory: {measured_mib:,.0f} MiB, {predicted_mib:,.0f} predicted.",
        notes=[
            "Beyond the limit nothing fails: a request is preempted, waits, and is recomputed.",
            "Only the listed counts were tried, so the first preemption may be at a lower one.",
            "Memory is that of the lab's process, which includes a tokenizer and no gRPC.",
        ],
    )


def _measure(llm: LLM, count: int) -> list[Cell]:
    driver = Driver(llm, max_batch_requests=64)
    for seed in range(count):
        driver.submit(driver.prompt(PROMPT_TOKENS, seed), ANSWER_TOKENS)
    took_s = driver.run()
    requests = list(driver.requests.values())
    if bad := [each.error for each in requests if each.error or len(each.tokens) != ANSWER_TOKENS]:
        raise RuntimeError(f"a request failed: {bad[0]}")
    return [
        count,
        max(step.running for step in driver.steps),
        max(step.blocks_in_use for step in driver.steps),
        driver.preemptions,
        count * ANSWER_TOKENS / took_s,
        max(each.ttft_s for each in requests),
    ]


def _longest_accepted(llm: LLM, upper: int) -> int:
    low = 1
    high = upper + 64
    while low < high:
        middle = (low + high + 1) // 2
        driver = Driver(llm)
        request = driver.submit(driver.prompt(8, 0), middle - 8) if middle > 8 else None
        refused = request is not None and bool(request.error)
        for name in driver.requests:
            driver.core.scheduler.cancel(name)
        driver.core.take_events()
        low, high = (low, middle - 1) if refused else (middle, high)
    return low
