"""Drawing the tokens of a step whose rows may hold draft tokens, without drawing in vain."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

from engine.core.errors import GrammarError
from engine.core.params import SampledToken, finish_reason
from engine.core.plan import PlanRow, SampleSpec
from engine.sampling.sample import Logits, Mask, sample

MaskFn = Callable[
    [Sequence[Sequence[SampleSpec]]], tuple[list[list[Mask | None]], dict[int, GrammarError]]
]
"""``Grammars.masks``."""


class _Rows(Protocol):
    """Rows of logits."""

    def rows(self, indexes: Sequence[int]) -> Self:
        """Some of the rows."""


_L = TypeVar("_L", bound=_Rows)
SampleFn = Callable[
    [_L, Sequence[Sequence[SampleSpec]], Sequence[int], Sequence[Sequence[Mask | None]]],
    list[list[SampledToken]],
]
"""``sampling.sample``, for whatever holds the rows."""


def draw(
    logits: Logits, rows: Sequence[PlanRow], eos_token_ids: Sequence[int], masks: MaskFn
) -> tuple[list[list[SampledToken]], dict[int, GrammarError]]:
    """``draw_by`` from rows of logits in this process's memory."""
    return draw_by(sample, logits, rows, eos_token_ids, masks)


def draw_by(
    sample: SampleFn[_L],
    logits: _L,
    rows: Sequence[PlanRow],
    eos_token_ids: Sequence[int],
    masks: MaskFn,
) -> tuple[list[list[SampledToken]], dict[int, GrammarError]]:
    """Draw what ``rows`` ask for; nothing behind a wrong draft token, nor behind the end of an answer.

    So a draw only ever sees a history that is a fact, or becomes one with this step.

    Args:
        sample: Draws from rows of ``logits``, as ``engine.sampling.sample.sample`` does.
        logits: Rows in the order of ``PlanRow.samples_by_row``, plan row by plan row.
        rows: Of the plan.
        eos_token_ids: The model's end tokens.
        masks: What the grammars allow.

    Returns:
        For each plan row its tokens, and the plan rows whose grammar failed at the first of them.
    """
    results: list[list[SampledToken]] = [[] for _ in rows]
    refused: dict[int, GrammarError] = {}
    begins, begin = [], 0
    for row in rows:
        begins.append(begin)
        begin += len(row.samples_by_row())
    eos = frozenset(eos_token_ids)
    alive = [index for index, row in enumerate(rows) if row.samples]
    step = 0
    while alive:
        whole = len(alive) == begin  # every row of logits: no copy
        part = logits if whole else logits.rows([begins[index] + step for index in alive])
        specs = [rows[index].samples_by_row()[step][1] for index in alive]
        allowed, faults = masks(specs)
        drawn = sample(part, specs, eos_token_ids, allowed)
        going_on = []
        for place, index in enumerate(alive):
            if place in faults and step:
                continue  # it has tokens; the next step will meet the fault
            if place in faults:
                refused[index] = faults[place]
            results[index] += drawn[place]
            if _goes_on(rows[index], results[index], eos):
                going_on.append(index)
        alive, step = going_on, step + 1
    return results, refused


def _goes_on(row: PlanRow, drawn: Sequence[SampledToken], eos: frozenset[int]) -> bool:
    """Whether the draft token behind the last draw was right, and is not the end of the answer."""
    step = len(drawn)
    if (
        step > row.num_draft_tokens
        or drawn[-1].token != row.tokens[step - row.num_draft_tokens - 1]
    ):
        return False
    spec = row.samples[step - 1]
    generated = len(spec.history) - spec.prompt_tokens + 1
    return not finish_reason(spec.params, eos, drawn[-1].token, generated)[0]
