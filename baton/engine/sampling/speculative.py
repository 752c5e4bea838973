"""Sampling of a step whose rows may contain draft tokens, only as far as they are right."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.sample import Mask
from baton.types.errors import GrammarError
from baton.types.params import SampledToken, finish_reason

MaskFn = Callable[
    [Sequence[Sequence[SampleSpec]]], tuple[list[list[Mask | None]], dict[int, GrammarError]]
]
"""Signature of ``Grammars.masks``."""


class LogitsRows(Protocol):
    """Rows of logits on the host or on a device."""

    def rows(self, indexes: Sequence[int]) -> Self:
        """Return some of the rows."""

    def sample(
        self,
        specs: Sequence[Sequence[SampleSpec]],
        eos_token_ids: Sequence[int],
        masks: Sequence[Sequence[Mask | None]] | None = None,
    ) -> list[list[SampledToken]]:
        """Sample tokens; see ``baton.engine.sampling.sample.sample``."""


def sample_rows(
    logits: LogitsRows,
    rows: Sequence[PlanRow],
    eos_token_ids: Sequence[int],
    masks: MaskFn,
) -> tuple[list[list[SampledToken]], dict[int, GrammarError]]:
    """Sample the tokens of plan rows, up to a wrong draft token or the end of a response.

    Each token is thus sampled with a history that is final, or becomes final with this step.
    ``logits`` has rows in the order of ``PlanRow.samples_by_row``, plan row by plan row.

    Returns:
        Tokens of each plan row, and errors of plan rows whose grammar failed at the first token.
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
        is_whole = len(alive) == begin  # all rows of logits: no copy
        part = logits if is_whole else logits.rows([begins[index] + step for index in alive])
        specs = [rows[index].samples_by_row()[step][1] for index in alive]
        allowed, faults = masks(specs)
        sampled = part.sample(specs, eos_token_ids, allowed)
        remaining = []
        for place, index in enumerate(alive):
            if place in faults and step:
                continue  # it has tokens; the next step reports the fault
            if place in faults:
                refused[index] = faults[place]
            results[index] += sampled[place]
            if _continues(rows[index], results[index], eos):
                remaining.append(index)
        alive = remaining
        step = step + 1
    return results, refused


def _continues(row: PlanRow, sampled: Sequence[SampledToken], eos: frozenset[int]) -> bool:
    """Return whether the draft token behind the last sample was right and does not end the row."""
    step = len(sampled)
    if (
        step > row.num_draft_tokens
        or sampled[-1].token != row.tokens[step - row.num_draft_tokens - 1]
    ):
        return False
    spec = row.samples[step - 1]
    generated = len(spec.history) - spec.prompt_tokens + 1
    return not finish_reason(spec.params, eos, sampled[-1].token, generated)[0]
