"""Sampling the tokens of a step whose rows may hold draft tokens, without sampling in vain."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.sample import Mask
from baton.types.errors import GrammarError
from baton.types.params import SampledToken, finish_reason

MaskFn = Callable[
    [Sequence[Sequence[SampleSpec]]], tuple[list[list[Mask | None]], dict[int, GrammarError]]
]
"""``Grammars.masks``."""


class LogitsRows(Protocol):
    """Rows of logits, wherever they are: ``baton.engine.sampling.sample.Logits``, or a device's."""

    def rows(self, indexes: Sequence[int]) -> Self:
        """Some of the rows."""

    def sample(
        self,
        specs: Sequence[Sequence[SampleSpec]],
        eos_token_ids: Sequence[int],
        masks: Sequence[Sequence[Mask | None]] | None = None,
    ) -> list[list[SampledToken]]:
        """See ``baton.engine.sampling.sample.sample``."""


def sample_rows(
    logits: LogitsRows,
    rows: Sequence[PlanRow],
    eos_token_ids: Sequence[int],
    masks: MaskFn,
) -> tuple[list[list[SampledToken]], dict[int, GrammarError]]:
    """Sample what ``rows`` ask for; nothing behind a wrong draft token, nor behind an answer's end.

    So each token is sampled with a history that is a fact, or becomes one with this step.

    Args:
        logits: Rows in the order of ``PlanRow.samples_by_row``, plan row by plan row.
        rows: Of the plan.
        eos_token_ids: The model's end tokens.
        masks: What the grammars allow.

    Returns:
        For each plan row its tokens, and the plan rows whose grammar failed at the first of them.
    """
    results: list[list[SampledToken]] = [[] for _ in rows]
    refused: dict[int, GrammarError] = {}
    begins = []
    begin = 0
    for row in rows:
        begins.append(begin)
        begin += len(row.samples_by_row())
    eos = frozenset(eos_token_ids)
    alive = [index for index, row in enumerate(rows) if row.samples]
    step = 0
    while alive:
        is_whole = len(alive) == begin  # every row of logits: no copy
        part = logits if is_whole else logits.rows([begins[index] + step for index in alive])
        specs = [rows[index].samples_by_row()[step][1] for index in alive]
        allowed, faults = masks(specs)
        sampled = part.sample(specs, eos_token_ids, allowed)
        going_on = []
        for place, index in enumerate(alive):
            if place in faults and step:
                continue  # it has tokens; the next step will meet the fault
            if place in faults:
                refused[index] = faults[place]
            results[index] += sampled[place]
            if _goes_on(rows[index], results[index], eos):
                going_on.append(index)
        alive = going_on
        step = step + 1
    return results, refused


def _goes_on(row: PlanRow, sampled: Sequence[SampledToken], eos: frozenset[int]) -> bool:
    """Whether the draft token behind the last sample was right, and does not end the answer."""
    step = len(sampled)
    if (
        step > row.num_draft_tokens
        or sampled[-1].token != row.tokens[step - row.num_draft_tokens - 1]
    ):
        return False
    spec = row.samples[step - 1]
    generated = len(spec.history) - spec.prompt_tokens + 1
    return not finish_reason(spec.params, eos, sampled[-1].token, generated)[0]
