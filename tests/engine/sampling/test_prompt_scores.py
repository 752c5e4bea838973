"""Scores and vectors of a real model: neither chunks nor scattered blocks nor neighbours show.

That they are right says ``test_against_transformers.py``; more of exactness is in ``test_llm.py``.
"""

import pytest

from baton.engine.core.plan import PlanRow, StepPlan
from baton.types.prompt_outputs import PromptOutputs
from tests.engine.conftest import BLOCK, Driver

TOKENS = [(7919 * i + 13) % 40_000 for i in range(45)]


def wanted_outputs() -> list[PromptOutputs]:
    return [
        PromptOutputs(TOKENS, 2, "mean"),
        PromptOutputs(TOKENS, 2, "last"),
    ]


def found(gathered: list[PromptOutputs]) -> list[object]:
    return [
        part
        for prompt_outputs in gathered
        for part in (prompt_outputs.scores(), prompt_outputs.vector())
    ]


@pytest.fixture(scope="module")
def whole(make_driver):
    driver: Driver = make_driver()
    gathered = wanted_outputs()
    for prompt_outputs in gathered:
        table = driver.blocks(len(TOKENS))
        driver.runner.execute(
            StepPlan(
                (
                    PlanRow(
                        sequence_id=1,
                        tokens=TOKENS,
                        start=0,
                        block_ids=table,
                        samples=(),
                        prompt_outputs=prompt_outputs,
                    ),
                )
            )
        )
    return found(gathered)


@pytest.mark.parametrize("chunks", [(16, 16), (7, 1, 1, 30)], ids=str)
def test_chunks_blocks_and_neighbours_do_not_show(make_driver, whole, chunks):
    driver: Driver = make_driver()
    other = driver.blocks(200)
    gathered = wanted_outputs()
    for prompt_outputs in gathered:
        table, start = driver.blocks(len(TOKENS), scattered=True), 0
        for size in (*chunks, len(TOKENS) - sum(chunks)):
            end = start + size
            blocks = table[: -(-end // BLOCK)]
            row = PlanRow(
                sequence_id=1,
                tokens=TOKENS[start:end],
                start=start,
                block_ids=blocks,
                samples=(),
                prompt_outputs=prompt_outputs,
            )
            beside = driver.row([5] * 200, start, end, other)
            driver.runner.execute(StepPlan((row, beside)))
            start = end
    assert found(gathered) == whole
