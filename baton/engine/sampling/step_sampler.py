"""Sampling of a step's tokens, with grammar masks and as far as draft tokens are right."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.grammars import Grammars
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
        """Sample tokens; see ``baton.engine.sampling.sample.Logits.sample``."""


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


class StepSampler:
    """Sampler of the tokens of successive steps; without ``grammars`` they are ignored.

    Attributes:
        refused_rows: Errors of the plan rows whose grammar failed in this step.
        mask_ns: Time that this step spent on grammars.
    """

    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None) -> None:
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self.refused_rows: Mapping[int, GrammarError] = {}
        self.mask_ns = 0

    def begin_step(self) -> None:
        """Reset the results of the step before."""
        self.refused_rows = {}
        self.mask_ns = 0

    def sample(self, logits: LogitsRows, rows: Sequence[PlanRow]) -> list[list[SampledToken]]:
        """Sample the tokens of each plan row; see ``sample_rows`` for the order of ``logits``."""
        results, self.refused_rows = sample_rows(logits, rows, self._eos_token_ids, self._masks)
        return results

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Return how many leading ``draft_tokens`` the grammar of ``spec`` allows."""
        if self._grammars is None or not spec.params.grammar:
            return len(draft_tokens)
        try:
            return self._grammars.admissible(spec, draft_tokens)
        except GrammarError:
            return 0  # the step without draft tokens reports the error

    def _masks(
        self, specs: Sequence[Sequence[SampleSpec]]
    ) -> tuple[list[list[Mask | None]], dict[int, GrammarError]]:
        if self._grammars is None:
            return [[None] * len(row_specs) for row_specs in specs], {}
        masks = self._grammars.masks(specs)
        self.mask_ns += self._grammars.mask_ns
        return masks
