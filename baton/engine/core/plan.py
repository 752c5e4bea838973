"""What the scheduler hands to a model runner: one step, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.types.params import SamplingParams
from baton.types.prompt_outputs import PromptOutputs


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample one token from a row's logits: the last one's, or one that verifies a draft token.

    ``history`` is the whole token list so far (prompt, then answer); penalties know by
    ``prompt_tokens`` where the prompt ends. The token sampled will stand at index ``len(history)``,
    and ``generated`` = ``len(history) - prompt_tokens`` (for ``min_tokens``).
    """

    choice: int
    params: SamplingParams
    history: Sequence[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One sequence's part of a step: compute ``tokens`` at positions ``start ...``.

    ``block_ids`` covers positions 0 to ``start + len(tokens) - 1``; the KV of positions below
    ``start`` is in the pool already. ``samples`` is empty while a prompt is not finished, and else
    holds one entry per choice, all sampled from the last row. ``prompt_outputs`` takes these rows'
    part when the step has succeeded, and not before.

    The last ``num_draft_tokens`` tokens may be draft tokens. Then ``samples`` has one entry for
    each of the last ``1 + num_draft_tokens`` rows, in order, with a history that takes the draft
    tokens before it for granted; what is sampled counts as far as the draft tokens before it were
    right.
    """

    sequence_id: int
    tokens: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    adapter: str = ""  # digest of the LoRA adapter that shapes this row
    prompt_outputs: PromptOutputs | None = None
    num_draft_tokens: int = 0

    @property
    def cost_tokens(self) -> int:
        """The row's share of a step's token budget."""
        return len(self.tokens) * (self.prompt_outputs.token_cost if self.prompt_outputs else 1)

    @property
    def decodes(self) -> bool:
        """Whether it continues an answer (or samples behind a prompt's last token alone)."""
        return bool(self.samples) and len(self.tokens) == 1 + self.num_draft_tokens

    def samples_by_row(self) -> list[tuple[int, tuple[SampleSpec, ...]]]:
        """(how many rows before the last, what is sampled there), in order."""
        if not self.num_draft_tokens:
            return [(0, self.samples)] if self.samples else []
        return [(self.num_draft_tokens - i, (sample,)) for i, sample in enumerate(self.samples)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. ``copies`` (source block, target block) happen before anything else."""

    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = field(default=())
