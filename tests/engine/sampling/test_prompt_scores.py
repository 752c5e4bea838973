"""Scores and vectors of a real model: neither chunks nor scattered blocks nor neighbours show.

That they are right says ``test_against_transformers.py``; more of exactness is in ``test_llm.py``.
"""

import pytest

from engine.core.plan import PlanRow, StepPlan
from engine.core.prompt_outputs import Harvest
from tests.engine.conftest import BLOCK, Driver

TOKENS = [(7919 * i + 13) % 40_000 for i in range(45)]


def harvests() -> list[Harvest]:
    return [
        Harvest(TOKENS, 2, "mean"),
        Harvest(TOKENS, 2, "last"),
    ]


def found(gathered: list[Harvest]) -> list[object]:
    return [part for harvest in gathered for part in (harvest.scores(), harvest.vector())]


@pytest.fixture(scope="module")
def whole(make_driver):
    driver: Driver = make_driver()
    gathered = harvests()
    for harvest in gathered:
        table = driver.blocks(len(TOKENS))
        driver.runner.execute(StepPlan((PlanRow(1, TOKENS, 0, table, (), harvest=harvest),)))
    return found(gathered)


@pytest.mark.parametrize("chunks", [(16, 16), (7, 1, 1, 30)], ids=str)
def test_chunks_blocks_and_neighbours_do_not_show(make_driver, whole, chunks):
    driver: Driver = make_driver()
    other = driver.blocks(200)
    gathered = harvests()
    for harvest in gathered:
        table, start = driver.blocks(len(TOKENS), scattered=True), 0
        for size in (*chunks, len(TOKENS) - sum(chunks)):
            end = start + size
            blocks = table[: -(-end // BLOCK)]
            row = PlanRow(1, TOKENS[start:end], start, blocks, (), harvest=harvest)
            beside = driver.row([5] * 200, start, end, other)
            driver.runner.execute(StepPlan((row, beside)))
            start = end
    assert found(gathered) == whole
