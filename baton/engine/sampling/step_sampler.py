"""What both backends do with a step's logits: grammars' masks, then tokens, row by row."""

from collections.abc import Mapping, Sequence

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.sampling.grammars import Grammars
from baton.engine.sampling.sample import Mask
from baton.engine.sampling.speculative import LogitsRows, sample_rows
from baton.types.errors import GrammarError
from baton.types.params import SampledToken


class StepSampler:
    """Samples the tokens of one step after the other.

    Args:
        eos_token_ids: Tokens that end an answer.
        grammars: For requests with a grammar; ``None`` ignores grammars.
    """

    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None) -> None:
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._refused_rows: dict[int, GrammarError] = {}
        self._mask_ns = 0

    @property
    def refused_rows(self) -> Mapping[int, GrammarError]:
        """Rows of the step's plan whose grammar failed, and why."""
        return self._refused_rows

    @property
    def mask_ns(self) -> int:
        """Time that the step spent on grammars."""
        return self._mask_ns

    def begin_step(self) -> None:
        """Forget what was refused and measured in the step before."""
        self._refused_rows = {}
        self._mask_ns = 0

    def sample(self, logits: LogitsRows, rows: Sequence[PlanRow]) -> list[list[SampledToken]]:
        """The tokens of each plan row, as far as its draft tokens are right.

        Args:
            logits: Rows in the order of ``PlanRow.samples_by_row``, plan row by plan row; finite.
            rows: Of the plan.
        """
        results, self._refused_rows = sample_rows(logits, rows, self._eos_token_ids, self._masks)
        return results

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """See ``baton.engine.core.model_runner.ModelRunner``."""
        if self._grammars is None or not spec.params.grammar:
            return len(draft_tokens)
        try:
            return self._grammars.admissible(spec, draft_tokens)
        except GrammarError:
            return 0  # the step without draft tokens will say it

    def _masks(
        self, specs: Sequence[Sequence[SampleSpec]]
    ) -> tuple[list[list[Mask | None]], dict[int, GrammarError]]:
        """What the grammars allow; see ``Grammars.masks``."""
        if self._grammars is None:
            return [[None] * len(row_specs) for row_specs in specs], {}
        masks = self._grammars.masks(specs)
        self._mask_ns += self._grammars.mask_ns
        return masks
