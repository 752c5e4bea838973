"""Step plan that the scheduler passes to a model runner, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.types.params import SamplingParams
from baton.types.prompt_outputs import PromptOutputs


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Request to sample one token from a row's logits, or to verify one draft token.

    ``history`` is the whole token list so far (prompt, then response); ``prompt_tokens`` is the
    length of the prompt in it. The sampled token gets the index ``len(history)``.
    """

    choice: int
    params: SamplingParams
    history: Sequence[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """Part of a step for one sequence: compute ``tokens`` at positions ``start ...``.

    ``block_ids`` covers positions 0 to ``start + len(tokens) - 1``; the KV of positions below
    ``start`` is in the pool. ``samples`` is empty for an unfinished prompt. Otherwise it has one
    entry per choice, all sampled from the last row. ``prompt_outputs`` receives these rows only
    after the step has succeeded.

    The last ``num_draft_tokens`` tokens may be draft tokens. Then ``samples`` has one entry for
    each of the last ``1 + num_draft_tokens`` rows, in order, with a history that contains the
    preceding draft tokens. A sampled token is valid if all draft tokens before it were right.
    """

    sequence_id: int
    tokens: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    adapter: str = ""  # digest of the LoRA adapter
    prompt_outputs: PromptOutputs | None = None
    num_draft_tokens: int = 0

    @property
    def cost_tokens(self) -> int:
        """Number of tokens that the row takes from the step's budget."""
        return len(self.tokens) * (self.prompt_outputs.token_cost if self.prompt_outputs else 1)

    @property
    def decodes(self) -> bool:
        """Return whether the row continues a response or computes only a prompt's last token."""
        return bool(self.samples) and len(self.tokens) == 1 + self.num_draft_tokens

    def samples_by_row(self) -> list[tuple[int, tuple[SampleSpec, ...]]]:
        """Return (number of rows before the last, its samples), in order."""
        if not self.num_draft_tokens:
            return [(0, self.samples)] if self.samples else []
        return [(self.num_draft_tokens - i, (sample,)) for i, sample in enumerate(self.samples)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Engine step.

    Attributes:
        copies: Copies of blocks (source, target), which are made first.
        written: Blocks that the worker's shell or the tier copier wrote since the last plan with
            rows. A runner with a second pool on a device copies them there.
    """

    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    written: tuple[int, ...] = ()
