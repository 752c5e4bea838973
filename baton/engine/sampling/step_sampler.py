"""Sampling of a step's tokens with grammar masks, for both backends."""

from collections.abc import Mapping, Sequence

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.grammars import Grammars
from baton.engine.sampling.sample import Mask
from baton.engine.sampling.speculative import LogitsRows, sample_rows
from baton.types.errors import GrammarError
from baton.types.params import SampledToken


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
