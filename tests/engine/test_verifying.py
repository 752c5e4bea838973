"""Draws of a step: all choices of a plain row, and guesses up to the first wrong one."""

import torch

from engine.core.params import SamplingParams
from engine.core.plan import PlanRow, SampleSpec
from engine.sampling import Logits
from engine.verifying import draw

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
HOT = SamplingParams(max_tokens=9, temperature=1.0, seed=3)


def row(tokens: list[int], guesses: int, params: SamplingParams = GREEDY, n: int = 1) -> PlanRow:
    samples = [SampleSpec(choice, params, [0], 1) for choice in range(n)]
    samples += [SampleSpec(0, params, [0, *tokens[1 : 1 + i]], 1) for i in range(1, guesses + 1)]
    return PlanRow(1, tokens, 0, [0], tuple(samples), guesses)


def peaks(*tokens: int) -> Logits:
    """Logits whose rows have these largest tokens."""
    return Logits(torch.nn.functional.one_hot(torch.tensor(tokens), 8).float() * 30)


def test_guesses_are_followed_to_the_first_wrong_one() -> None:
    rows = [row([7, 1, 2, 3], 3), row([7, 1, 5, 3], 3), row([7], 0)]
    drawn = draw(peaks(1, 2, 3, 4, 1, 2, 3, 4, 6), rows, ())
    assert [[s.token for s in tokens] for tokens in drawn] == [[1, 2, 3, 4], [1, 2], [6]]


def test_rows_that_draw_nothing_and_rows_with_choices_keep_their_places() -> None:
    silent = PlanRow(2, [1, 2], 0, [0])
    drawn = draw(peaks(3, 1, 2), [silent, row([5], 0, n=3), row([7, 1], 1)], ())
    assert [[s.token for s in tokens] for tokens in drawn] == [[], [3, 3, 3], [1, 2]]


def test_refined_logits_stay_with_their_rows() -> None:
    raw = torch.zeros(3, 8)
    refined = Logits(raw, torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[0.0, 1]] * 3))
    drawn = draw(refined, [row([7, 2, 4], 2, HOT)], ())
    plain = draw(refined, [row([7, 2, 4], 2)], ())
    assert [s.token for s in plain[0]] == [2, 4, 6]
    assert drawn == draw(refined, [row([7, 2, 4], 2, HOT)], ())
