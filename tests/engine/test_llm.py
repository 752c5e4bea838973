"""The notebook: ten lines, no services."""

import numpy as np
import pytest
import torch

from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.llm import LLM
from baton.text.grammar import Framed, translate
from baton.text.reasoning import ReasoningSyntax, ReasoningTags
from baton.types.errors import GrammarError, InvalidRequestError, PromptTooLongError
from baton.types.params import SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_blocks=96, threads=1, max_step_tokens=64)


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_vectors_of_its_pool_begin_with_a_cache_line(llm: LLM) -> None:
    assert llm.runner._pool.data_ptr() % 64 == 0


def test_prompts_together_give_the_answers_of_prompts_alone(llm: LLM) -> None:
    prompts = ["The sea is", "Once upon a time", "def main():\n"]
    together = llm.generate(prompts, max_tokens=10, temperature=0.7, seed=4)
    alone = [llm.generate([p], max_tokens=10, temperature=0.7, seed=4)[0] for p in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_a_prefix_hit_does_not_show(llm: LLM) -> None:
    prompt = [(j * 11 + 3) % 40_000 for j in range(100)]
    first = llm.generate([prompt], max_tokens=8, temperature=1.0, seed=1)[0]
    second = llm.generate([prompt], max_tokens=8, temperature=1.0, seed=1)[0]
    assert second.cached_tokens >= 96 > first.cached_tokens
    assert second.tokens == first.tokens


def test_several_choices_share_their_prompt(llm: LLM) -> None:
    outputs = llm.generate(["The sea is"], max_tokens=6, temperature=1.2, seed=3, n=3)
    assert [o.choice for o in outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs}) > 1
    again = llm.generate(["The sea is"], max_tokens=6, temperature=1.2, seed=3, n=3)
    assert [o.tokens for o in again] == [o.tokens for o in outputs]


def test_a_drawn_token_has_the_same_score_when_it_stands_in_a_prompt(llm: LLM) -> None:
    """To the bit: prefill in chunks and decode token by token agree on the logits."""
    prompt = llm.tokenizer.encode("In a village of La Mancha, the name of which I have no desire")
    [drawn] = llm.generate([prompt], max_tokens=12, logprobs=3, temperature=0.8, seed=3)
    [again] = llm.generate([[*prompt, *drawn.token_ids]], max_tokens=1, prompt_logprobs=3)
    assert again.scores is not None
    own = np.frombuffer(again.scores.logprobs, "<f4")[len(prompt) - 1 :]
    assert own.tolist() == [token.logprob for token in drawn.tokens]
    ids = np.frombuffer(again.scores.top_ids, "<u4").reshape(-1, 3)[len(prompt) - 1 :]
    assert ids.tolist() == [[token for token, _ in entry.top] for entry in drawn.tokens]


@pytest.mark.slow
def test_preemption_does_not_show_in_scores_and_vectors(llm: LLM) -> None:
    prompts = [[(i * 31 + j * 7) % 40_000 for j in range(250)] for i in range(5)]
    params = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    before = llm.core.batch.preemptions
    crowded = llm.generate(prompts, params)  # 5 x 320 tokens into 96 x 16
    assert llm.core.batch.preemptions > before
    [alone] = llm.generate([prompts[4]], max_tokens=1, prompt_logprobs=1)
    assert alone.scores == crowded[4].scores
    assert (llm.embed(prompts)[4] == llm.embed([prompts[4]])[0]).all()


def test_bad_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([[]], max_tokens=4)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate([[99_999_999]], max_tokens=4)
    with pytest.raises(PromptTooLongError, match="8192"):
        llm.generate([[5] * 8190], max_tokens=4)
    assert llm.generate(["x"], max_tokens=1)[0].tokens


def test_the_dense_yardstick_computes_the_same_model(llm: LLM) -> None:
    from baton.engine.loading.open import load_weights
    from baton.engine.selfcheck import DenseLlama

    prompt = llm.tokenizer.encode("The capital of France is")
    with torch.inference_mode():
        dense = DenseLlama(llm.artifact.config, load_weights(llm.artifact, "fp32"), 1, 64)
        tokens = dense.step(torch.tensor([prompt]), 0)
        drawn = [int(tokens)]
        for position in range(len(prompt), len(prompt) + 5):
            tokens = dense.step(tokens, position)
            drawn.append(int(tokens))
    assert drawn == llm.generate([prompt], max_tokens=6, ignore_eos=True)[0].token_ids


@pytest.mark.slow
def test_a_grammar_holds_through_preemption_and_forks(llm: LLM) -> None:
    grammar = translate("json", '{"type": "array", "items": {"type": "string"}, "minItems": 99}')
    prompts = [[(i * 31 + j * 7) % 40_000 for j in range(310)] for i in range(4)]
    fields = {"max_tokens": 40, "temperature": 0.8, "seed": 5, "grammar": grammar, "n": 2}
    before = llm.core.batch.preemptions
    crowded = llm.generate(prompts, **fields)  # 4 x 310 + 8 x 40 tokens into 96 x 16
    assert llm.core.batch.preemptions > before
    alone = llm.generate([prompts[3]], **fields)  # the last ticket is preempted first
    assert [o.token_ids for o in alone] == [o.token_ids for o in crowded[6:]]
    assert all(output.text.startswith("[") for output in crowded)


def test_a_complete_answer_stops(llm: LLM) -> None:
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 20}):
        answer = llm.generate(["Yes or no?"], grammar=translate("choice", '["yes"]'), **fields)[0]
        assert (answer.text, answer.finish_reason) == ("yes", "stop")


def test_a_budget_closes_the_thinking(llm: LLM) -> None:
    begin_id, end_id = map(llm.tokenizer.backend.token_to_id, ("<repo_name>", "<file_sep>"))
    tags = ReasoningTags("<repo_name>", "<file_sep>")  # for tags that are one token each
    syntax = ReasoningSyntax(tags=tags, begin_id=begin_id, end_id=end_id)
    thought = syntax.grammar(begun=True, end_ids=llm.artifact.config.eos_token_ids, budget=5)
    grammar = translate("framed", Framed("choice", '["yes"]', before=thought).encoded())
    answer = llm.generate(["The sea is blue and"], grammar=grammar, max_tokens=20)[0]
    assert answer.token_ids.index(end_id) == 5
    assert answer.text.endswith("yes")
    assert answer.finish_reason == "stop"


def test_a_grammar_that_fails_ends_only_its_request(llm: LLM) -> None:
    with pytest.raises(GrammarError, match="unknown name"):
        llm.generate(["a"], grammar="start: missing")
    spec = RequestSpec(
        kind=Kind.FULL,
        params=SamplingParams(max_tokens=9, grammar=translate("regex", "a+")),
        hash_seed=bytes(16),
        ticket=10**9,
    )
    request = EngineRequest(request_id="off", prompt=[1, 2, 3], spec=spec)
    llm.core.scheduler.submit(request, 0)
    sequence = next(s for s in llm.core.batch.queue.items if s.request is request)
    # An answer that the grammar never allowed:
    sequence.tokens += llm.tokenizer.encode("zzz")
    assert llm.generate(["The sea is"], max_tokens=4)[0].tokens
    assert "off" not in llm.core.scheduler._requests
    llm.core.batch.check_integrity()
