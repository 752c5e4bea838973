"""Drawing the tokens of a step whose rows may hold guesses, without drawing in vain."""

from collections.abc import Callable, Sequence

from engine.core.params import SampledToken
from engine.core.plan import PlanRow, SampleSpec
from engine.sampling import Logits, Mask, sample

Masks = Callable[
    [Sequence[Sequence[SampleSpec]], Sequence[int]], Sequence[Sequence[Mask | None]] | None
]
"""Allowed tokens for some draws, and the plan rows that these belong to."""


def draw(
    logits: Logits,
    rows: Sequence[PlanRow],
    eos_token_ids: Sequence[int],
    masks: Masks = lambda *_: None,
) -> list[list[SampledToken]]:
    """Draw what ``rows`` ask for; behind a wrong guess nothing is drawn.

    So a grammar only ever sees answers that follow it.

    Args:
        logits: Rows in the order of ``PlanRow.draws``, plan row by plan row.
        rows: Of the plan.
        eos_token_ids: The model's end tokens.
        masks: What grammars allow.

    Returns:
        For each plan row its tokens.
    """
    results: list[list[SampledToken]] = [[] for _ in rows]
    begins, begin = [], 0
    for row in rows:
        begins.append(begin)
        begin += len(row.draws())
    alive = [index for index, row in enumerate(rows) if row.samples]
    step = 0
    while alive:
        whole = len(alive) == begin  # every row of logits: no copy
        part = logits if whole else logits.rows([begins[index] + step for index in alive])
        specs = [rows[index].draws()[step][1] for index in alive]
        found = sample(part, specs, eos_token_ids, masks(specs, alive))
        for index, drawn in zip(alive, found, strict=True):
            results[index] += drawn
        step += 1
        alive = [index for index in alive if _goes_on(rows[index], results[index], step)]
    return results


def _goes_on(row: PlanRow, drawn: Sequence[SampledToken], step: int) -> bool:
    """Whether the guess behind the last draw was right."""
    return step <= row.guesses and drawn[-1].token == row.tokens[step - row.guesses - 1]
