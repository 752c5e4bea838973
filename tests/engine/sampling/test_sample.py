"""What each sampling parameter does to the draw."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from baton.engine.core.plan import SampleSpec
from baton.engine.sampling.sample import Logits, _sample_token, candidates, gumbel
from baton.types.params import SampledToken, SamplingParams

EOS = (2,)


def draw(
    logits: list[float],
    *,
    history: tuple[int, ...] = (0,),
    prompt_tokens: int = 1,
    choice: int = 0,
    **fields: object,
) -> SampledToken:
    params = SamplingParams(max_tokens=9, **{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    spec = SampleSpec(choice, params, history, prompt_tokens)
    return Logits(torch.tensor([logits])).sample([[spec]], EOS)[0][0]


def shares(logits: list[float], draws: int = 3000, **fields: object) -> dict[int, float]:
    counts = Counter(
        draw(logits, seed=seed, **{"temperature": 1.0, **fields}).token for seed in range(draws)
    )
    return {token: count / draws for token, count in counts.items()}


def test_temperature_zero_takes_the_largest() -> None:
    assert draw([0.1, 3.0, 2.9]).token == 1


def test_draws_follow_the_softmax() -> None:
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    found = shares(logits)
    assert found[0] == pytest.approx(0.6, abs=0.04)
    assert found[2] == pytest.approx(0.1, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    logits = [math.log(0.6), math.log(0.4)]
    # p ** (1 / T), normalised
    assert shares(logits, temperature=0.5)[0] == pytest.approx(0.36 / 0.52, abs=0.04)
    assert shares(logits, temperature=100.0)[0] == pytest.approx(0.5, abs=0.04)


def test_noise_is_a_pure_function_of_seed_choice_and_position() -> None:
    noise = gumbel(7, 0, 5, 1000)
    assert np.array_equal(noise, gumbel(7, 0, 5, 1000))
    for other in (gumbel(8, 0, 5, 1000), gumbel(7, 1, 5, 1000), gumbel(7, 0, 6, 1000)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.15
    assert noise.mean() == pytest.approx(0.5772, abs=0.15)


def test_a_seed_may_be_any_integer_of_64_bits() -> None:
    assert np.isfinite(gumbel(-1, 0, 0, 10)).all()
    assert np.array_equal(gumbel(-1, 0, 0, 10), gumbel(2**64 - 1, 0, 0, 10))


def test_the_position_is_the_length_of_the_history() -> None:
    flat = [0.0] * 500
    one = draw(flat, temperature=1.0, seed=3, history=(0, 1, 2))
    two = draw(flat, temperature=1.0, seed=3, history=(9, 8, 7), prompt_tokens=3)
    assert one == two
    assert one != draw(flat, temperature=1.0, seed=3, history=(0, 1, 2, 3))


def test_top_k_keeps_k() -> None:
    assert set(shares([3.0, 2.9, 2.8, 2.7], top_k=2)) == {0, 1}


def test_top_k_with_ties_keeps_the_lower_ids() -> None:
    ids = candidates(np.zeros(10), SamplingParams(max_tokens=1, top_k=3))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(shares(logits, top_p=0.6)) == {0, 1}
    assert set(shares(logits, top_p=0.4)) == {0}


def test_top_p_over_a_flat_vocabulary_needs_most_of_it() -> None:
    ids = candidates(np.zeros(5000), SamplingParams(max_tokens=1, top_p=0.9))
    assert ids is not None
    assert len(ids) == pytest.approx(4500, abs=1)


def test_min_p_is_relative_to_the_best() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(shares(logits, min_p=0.25)) == {0, 1, 2}


def test_filters_combine() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(shares(logits, top_k=3, top_p=0.7)) == {0, 1}  # of the three: 4/9, 3/9, 2/9


def test_logit_bias_moves_and_bans() -> None:
    assert draw([1.0, 2.0], logit_bias=((0, 1.5),)).token == 0
    assert draw([1.0, 2.0], logit_bias=((1, -100.0),)).token == 0


def test_a_bad_word_is_never_completed() -> None:
    logits = [1.0, 2.0, 3.0]
    assert draw(logits, bad_words=((2,),)).token == 1
    assert draw(logits, bad_words=((2,), (1,))).token == 0
    after_one: dict[str, object] = {"history": (2, 0, 1), "prompt_tokens": 1}
    assert draw(logits, bad_words=((1, 2),), **after_one).token == 1  # type: ignore[arg-type]
    assert draw(logits, bad_words=((0, 2),), **after_one).token == 2  # type: ignore[arg-type]
    assert draw(logits, bad_words=((0, 1, 2),), **after_one).token == 1  # type: ignore[arg-type]
    # The prompt does not count, and a grammar has the last word.
    assert draw(logits, bad_words=((1, 2),), history=(0, 1), prompt_tokens=2).token == 2
    assert masked(logits, {2}, bad_words=((2,),)).token == 2


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    history, prompt = (0, 0, 0, 1), 3
    assert (
        draw([2.0, 1.9, 0.0], history=history, prompt_tokens=prompt, presence_penalty=1.0).token
        == 0
    )
    assert (
        draw([1.8, 1.9, 0.0], history=history, prompt_tokens=prompt, presence_penalty=1.0).token
        == 0
    )
    twice = (0, 1, 1)
    assert draw([1.0, 1.9], history=twice, frequency_penalty=0.4).token == 1
    assert draw([1.0, 1.9], history=twice, frequency_penalty=0.5).token == 0


def test_repetition_looks_at_prompt_and_answer_and_pushes_negatives_down() -> None:
    assert draw([2.0, 1.5], history=(0,), repetition_penalty=1.5).token == 1
    assert draw([-1.0, -1.2], history=(0,), repetition_penalty=1.5).token == 1
    assert draw([2.0, 1.5], history=(1,), repetition_penalty=1.5).token == 0


@pytest.mark.parametrize("penalty", [0.0, 1e-46, 0.5, 1e30, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_never_undoes_what_is_forbidden(penalty, temperature) -> None:
    """Defect 20: minus infinity times zero is no number, and argmax takes that for the largest."""
    mask = np.array([False, True, False])
    raw = torch.tensor([5.0, 1.0, -2.0])
    params = SamplingParams(max_tokens=8, repetition_penalty=penalty, temperature=temperature)
    for first in (1.0, -1.0, 0.0):
        raw[1] = first
        spec = SampleSpec(0, params, (0, 1, 2), 1)
        assert _sample_token(raw, spec, (), mask) == 1


def test_min_tokens_forbids_ends_until_then() -> None:
    logits = [0.0, 1.0, 5.0, 4.0]
    assert draw(logits, min_tokens=2, history=(0, 1)).token == 3
    assert draw(logits, min_tokens=2, history=(0, 1), stop_token_ids=(3,)).token == 1
    assert draw(logits, min_tokens=2, history=(0, 1, 1)).token == 2
    assert draw(logits, min_tokens=2, history=(0, 1), ignore_eos=True).token == 2


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [1.0, 2.0, 3.0]
    drawn = draw(logits, logprobs=2, logit_bias=((0, 10.0),))
    expected = torch.log_softmax(torch.tensor(logits), -1).tolist()
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(expected[0])
    assert [token for token, _ in drawn.top] == [2, 1]
    assert [value for _, value in drawn.top] == pytest.approx([expected[2], expected[1]])


def test_logprobs_zero_gives_the_drawn_token_alone() -> None:
    drawn = draw([1.0, 2.0], logprobs=0)
    assert drawn.logprob is not None
    assert drawn.top == ()


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=5)
    specs = [[SampleSpec(c, params, (1, 2, i), 2) for c in range(2)] for i in range(8)]
    together = Logits(rows).sample(specs, EOS)
    alone = [Logits(rows[i : i + 1]).sample([specs[i]], EOS)[0] for i in range(8)]
    assert together == alone


def test_refined_logits_break_the_ties_of_bf16() -> None:
    raw = torch.tensor([[25.0, 25.0, 24.0]], dtype=torch.bfloat16)
    logits = Logits(raw, torch.tensor([[0, 1]]), torch.tensor([[24.95, 25.05]]))
    plain = SampleSpec(0, SamplingParams(max_tokens=1, temperature=0.0), (0,), 1)
    full = SampleSpec(0, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), (0,), 1)
    assert logits.sample([[plain]], EOS)[0][0].token == 1
    assert logits.sample([[full]], EOS)[0][0].token == 1


def test_finite_finds_nan_and_inf_per_row() -> None:
    rows = torch.zeros(4, 50)
    rows[1, 3] = math.nan
    rows[2, 4] = -math.inf
    rows[3, :2] = torch.tensor([math.inf, -math.inf])
    assert Logits(rows).finite() == [True, False, False, False]


def masked(logits: list[float], allowed: set[int], **fields: object) -> SampledToken:
    fields = {"history": (0,), "grammar": "any", "temperature": 0.0, **fields}
    history = fields.pop("history")
    params = SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]
    spec = SampleSpec(0, params, history, 1)  # type: ignore[arg-type]
    mask = np.array([token in allowed for token in range(len(logits))])
    return Logits(torch.tensor([logits])).sample([[spec]], EOS, [[mask]])[0][0]


class TestGrammar:
    def test_only_allowed_tokens_are_drawn(self) -> None:
        assert masked([9.0, 1.0, 5.0, 2.0], {1, 3}).token == 3
        found = {
            masked([9.0, 1.0, 5.0, 2.0], {1, 3}, temperature=2.0, seed=s).token for s in range(50)
        }
        assert found == {1, 3}

    def test_bias_and_penalties_act_among_what_is_allowed(self) -> None:
        bias = ((0, 100.0), (1, 5.0))
        assert masked([9.0, 1.0, 5.0, 2.0], {1, 3}, logit_bias=bias).token == 1
        assert masked([0.0, 3.0, 0.0, 2.9], {1, 3}, presence_penalty=1.0, history=(0, 1)).token == 3

    @pytest.mark.parametrize("narrow", [{"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.001}])
    def test_narrowing_keeps_to_what_is_allowed(self, narrow: dict) -> None:
        drawn = [
            masked([9.0, 1.0, 5.0, 2.0], {1, 3}, temperature=1.0, seed=s, **narrow).token
            for s in range(30)
        ]
        assert set(drawn) == {1, 3}

    def test_min_tokens_forbids_the_end_only_where_something_else_may_follow(self) -> None:
        assert masked([0.0, 0.0, 9.0, 1.0], {2, 3}, min_tokens=4).token == 3
        assert masked([0.0, 0.0, 9.0, 1.0], {2}, min_tokens=4).token == 2

    def test_ignore_eos_forbids_the_end_only_where_something_else_may_follow(self) -> None:
        assert masked([0.0, 0.0, 9.0, 1.0], {2, 3}, ignore_eos=True).token == 3
        assert masked([0.0, 0.0, 9.0, 1.0], {2}, ignore_eos=True).token == 2

    def test_logprobs_are_of_the_model_not_of_the_grammar(self) -> None:
        found = masked([9.0, 1.0, 5.0, 2.0], {1}, logprobs=2)
        assert found.token == 1
        assert [token for token, _ in found.top] == [0, 2]
        assert found.logprob == pytest.approx(draw([9.0, 1.0, 5.0, 2.0], logprobs=1).logprob - 8)
