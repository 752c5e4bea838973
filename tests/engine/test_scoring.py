"""Scores and embeddings of a real model: exact on every path.

That they are right says ``test_against_transformers.py``.
"""

import numpy as np
import pytest

from engine.core.harvest import Harvest
from engine.core.params import SamplingParams
from engine.core.plan import PlanRow, StepPlan
from engine.llm import LLM
from tests.engine.conftest import BLOCK, Driver

TEXT = (
    "In a village of La Mancha, the name of which I have no desire to call to mind, there lived "
    "not long since one of those gentlemen that keep a lance in the lance-rack, an old buckler."
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_blocks=96, threads=1)


def scored(llm, tokens, k=2, **fields):
    [output] = llm.generate([tokens], prompt_logprobs=k, **{"max_tokens": 1, **fields})
    return output


def test_a_drawn_token_has_the_same_score_when_it_stands_in_a_prompt(llm):
    """To the bit: prefill in one chunk and decode token by token agree on the logits."""
    prompt = llm.tokenizer.encode(TEXT)
    [drawn] = llm.generate([prompt], max_tokens=24, logprobs=3, temperature=0.8, seed=3)
    scores = scored(llm, [*prompt, *drawn.token_ids], k=3).scores
    own = np.frombuffer(scores.logprobs, "<f4")[len(prompt) - 1 :]
    assert own.tolist() == [token.logprob for token in drawn.tokens]
    ids = np.frombuffer(scores.top_ids, "<u4").reshape(-1, 3)[len(prompt) - 1 :]
    assert ids.tolist() == [[token for token, _ in entry.top] for entry in drawn.tokens]


@pytest.mark.parametrize("chunks", [(16, 16), (7, 1, 1, 30)], ids=str)
def test_chunks_blocks_and_neighbours_do_not_show(llm, make_driver, chunks):
    tokens = llm.tokenizer.encode(TEXT)
    wanted = scored(llm, tokens).scores
    [vector] = llm.embed([tokens])
    driver: Driver = make_driver()
    table = driver.blocks(len(tokens), scattered=True)
    other = driver.blocks(200)
    scores, mean = Harvest(tokens, 2, ""), Harvest(tokens, None, "mean")
    start = 0
    for size in (*chunks, len(tokens) - sum(chunks)):
        end = start + size
        blocks = table[: -(-end // BLOCK)]
        beside = driver.row([5] * 200, start, end, other)
        for harvest in (scores, mean):  # the second writes what is there already
            row = PlanRow(1, tokens[start:end], start, blocks, (), harvest=harvest)
            driver.runner.execute(StepPlan((row, beside)))
        start = end
    assert scores.scores() == wanted
    raw = np.frombuffer(mean.vector(), "<f4")
    assert (raw / np.linalg.norm(raw) == vector).all()


def test_preemption_and_batch_do_not_show(llm):
    prompts = [[(i * 31 + j * 7) % 40_000 for j in range(250)] for i in range(5)]
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    before = llm.core.scheduler.preemptions
    crowded = llm.generate(prompts, params)  # 5 x 320 tokens into 96 x 16
    assert llm.core.scheduler.preemptions > before
    assert scored(llm, prompts[4], k=1).scores == crowded[4].scores
    together = llm.embed(prompts)
    assert (together[4] == llm.embed([prompts[4]])[0]).all()
