"""Draws of a step: all choices of a plain row, and draft tokens up to the first wrong one."""

from collections.abc import Sequence

import pytest
import torch

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.sample import Logits, Mask
from baton.engine.sampling.step_sampler import sample_rows
from baton.types.errors import GrammarError
from baton.types.params import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
HOT = SamplingParams(max_tokens=9, temperature=1.0, seed=3)


def free(
    specs: Sequence[Sequence[SampleSpec]],
) -> tuple[list[list[Mask | None]], dict[int, GrammarError]]:
    """No grammar anywhere."""
    return [[None] * len(wanted) for wanted in specs], {}


def row(
    tokens: list[int], draft_tokens: int, params: SamplingParams = GREEDY, n: int = 1
) -> PlanRow:
    samples = [SampleSpec(choice, params, [0], 1) for choice in range(n)]
    samples += [
        SampleSpec(0, params, [0, *tokens[1 : 1 + i]], 1) for i in range(1, draft_tokens + 1)
    ]
    return PlanRow(
        sequence_id=1,
        tokens=tokens,
        start=0,
        block_ids=[0],
        samples=tuple(samples),
        num_draft_tokens=draft_tokens,
    )


def peaks(*tokens: int) -> Logits:
    """Logits whose rows have these largest tokens."""
    return Logits(torch.nn.functional.one_hot(torch.tensor(tokens), 8).float() * 30)


def test_guesses_are_followed_to_the_first_wrong_one() -> None:
    rows = [row([7, 1, 2, 3], 3), row([7, 1, 5, 3], 3), row([7], 0)]
    drawn, _ = sample_rows(peaks(1, 2, 3, 4, 1, 2, 3, 4, 6), rows, (), free)
    assert [[s.token for s in tokens] for tokens in drawn] == [[1, 2, 3, 4], [1, 2], [6]]


def test_rows_that_draw_nothing_and_rows_with_choices_keep_their_places() -> None:
    silent = PlanRow(sequence_id=2, tokens=[1, 2], start=0, block_ids=[0])
    drawn, _ = sample_rows(peaks(3, 1, 2), [silent, row([5], 0, n=3), row([7, 1], 1)], (), free)
    assert [[s.token for s in tokens] for tokens in drawn] == [[], [3, 3, 3], [1, 2]]


def test_refined_logits_stay_with_their_rows() -> None:
    raw = torch.zeros(3, 8)
    refined = Logits(raw, torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[0.0, 1]] * 3))
    drawn, _ = sample_rows(refined, [row([7, 2, 4], 2, HOT)], (), free)
    plain, _ = sample_rows(refined, [row([7, 2, 4], 2)], (), free)
    assert [s.token for s in plain[0]] == [2, 4, 6]
    assert drawn == sample_rows(refined, [row([7, 2, 4], 2, HOT)], (), free)[0]


def test_nothing_is_drawn_behind_the_end_of_an_answer() -> None:
    rows = [row([7, 1, 2, 3], 3)]
    assert len(sample_rows(peaks(1, 2, 3, 4), rows, (2,), free)[0][0]) == 2, "2 ends it"
    short = SamplingParams(max_tokens=3, temperature=0.0)
    drawn = sample_rows(peaks(1, 2, 3, 4), [row([7, 1, 2, 3], 3, short)], (), free)[0]
    assert len(drawn[0]) == 3


@pytest.mark.parametrize(("at", "tokens", "refused"), [(0, [1], [0]), (2, [1, 2], [])])
def test_a_grammar_that_fails_behind_a_guess_fails_when_that_is_a_fact(
    at: int, tokens: list[int], refused: list[int]
) -> None:
    def failing(
        specs: Sequence[Sequence[SampleSpec]],
    ) -> tuple[list[list[Mask | None]], dict[int, GrammarError]]:
        masks, _ = free(specs)
        faulty = len(specs[0][0].history) == 1 + at
        return masks, {0: GrammarError("too much work")} if faulty else {}

    wrong_at_once = row([7, 1 if at else 5, 2, 3], 3)
    drawn, faults = sample_rows(peaks(1, 2, 3, 4), [wrong_at_once], (), failing)
    assert [s.token for s in drawn[0]] == tokens
    assert list(faults) == refused
