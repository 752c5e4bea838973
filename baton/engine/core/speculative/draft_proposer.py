"""Draft tokens from a draft model: a small model with the same vocabulary beside the main one.

It samples with the same parameters and noise as the main model, so a draft token is right whenever
its logits lead to the same token, at any temperature. It has its own KV pool. It computes missing
KV (transferred prompts, tokens that it did not propose) itself, in chunks. If its pool is full,
there are no draft tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.engine.core.blocks import BlockPool
from baton.engine.core.model_runner import ModelRunner
from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.core.sequence import TokenSequence, blocks_for
from baton.engine.core.speculative.proposers import MAX_DRAFT_TOKENS, DraftCandidate, Proposal
from baton.types.errors import NumericsError
from baton.types.params import SamplingParams, finish_reason


@dataclass(slots=True)
class _Draft:
    sequence: TokenSequence
    params: SamplingParams
    computed: list[int] = field(default_factory=list)  # tokens with KV in the draft model's pool
    agreed: int = 0  # leading ones that equal the sequence's tokens
    blocks: list[int] = field(default_factory=list)
    broken: bool = False
    target: int = 0  # draft tokens to propose in this step
    draft_tokens: list[int] = field(default_factory=list)

    def forget_rejected(self) -> None:
        """Keep confirmed tokens; the KV of the others will be overwritten."""
        tokens = self.sequence.tokens
        while self.agreed < min(len(self.computed), len(tokens) - 1) and (
            self.computed[self.agreed] == tokens[self.agreed]
        ):
            self.agreed += 1
        del self.computed[self.agreed :]

    def missing(self) -> int:
        """Return how many tokens of the sequence lack KV, the newest one included."""
        return len(self.sequence.tokens) - len(self.computed)

    def row(self, count: int) -> PlanRow:
        """Return a row of the next ``count`` tokens that samples if it reaches the end."""
        known = [*self.sequence.tokens, *self.draft_tokens]
        start = len(self.computed)
        end = len(self.computed) + count
        samples: tuple[SampleSpec, ...] = ()
        if end == len(known):
            sample = SampleSpec(
                choice=self.sequence.choice,
                params=self.params,
                history=known,
                prompt_tokens=len(self.sequence.request.prompt),
            )
            samples = (sample,)
        return PlanRow(
            sequence_id=self.sequence.sequence_id,
            tokens=known[start:end],
            start=start,
            block_ids=self.blocks[: blocks_for(end)],
            samples=samples,
        )


class DraftProposer:
    """Proposer with a draft model over its own KV pool, for all sequences of a step together."""

    def __init__(self, runner: ModelRunner) -> None:
        self.untimed = False
        self._runner = runner
        self._eos = frozenset(runner.eos_token_ids)
        self._pool = BlockPool(runner.geometry.num_blocks)
        self._drafts: dict[int, _Draft] = {}

    def propose(self, candidates: Sequence[DraftCandidate], budget_tokens: int) -> list[Proposal]:
        """Propose draft tokens with one forward pass per token over all sequences."""
        self.untimed = False
        drafts = [self._draft(candidate) for candidate in candidates]
        ready = self._catch_up(drafts, budget_tokens)
        while ready:
            self._propose_next(ready)
            ready = [d for d in ready if not d.broken and len(d.draft_tokens) < d.target]
        return [Proposal(draft.draft_tokens) for draft in drafts]

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        """Release the blocks of all other sequences."""
        for sequence_id in self._drafts.keys() - sequence_ids.keys():
            self._pool.release(self._drafts.pop(sequence_id).blocks)

    def check_integrity(self) -> None:
        """Recount the draft model's blocks; see ``BlockPool.check_integrity``."""
        self._pool.check_integrity([draft.blocks for draft in self._drafts.values()])

    def _draft(self, candidate: DraftCandidate) -> _Draft:
        sequence = candidate.sequence
        draft = self._drafts.get(sequence.sequence_id)
        if draft is None:
            params = msgspec.structs.replace(sequence.request.spec.params, logprobs=None)
            draft = self._drafts[sequence.sequence_id] = _Draft(sequence, params)
        draft.draft_tokens = []
        draft.target = 0 if draft.broken else candidate.allowed(0)
        if draft.target:
            need = blocks_for(len(sequence.tokens) + draft.target) - len(draft.blocks)
            after = draft.blocks[-1] if draft.blocks else None
            pages = self._pool.allocate(need, after) if need > 0 else []
            if pages is None:
                draft.target = 0
            else:
                draft.blocks += pages
        draft.forget_rejected()
        return draft

    def _catch_up(self, drafts: Sequence[_Draft], budget_tokens: int) -> list[_Draft]:
        """Compute missing tokens within the budget; return the drafts that can propose now."""
        ready = []
        rows = []
        late = []
        for draft in drafts:
            missing = draft.missing()
            if not draft.target or not budget_tokens:
                continue
            if missing <= budget_tokens:
                ready.append(draft)
            else:
                rows.append(draft.row(budget_tokens))
                late.append(draft)
            budget_tokens -= min(missing, budget_tokens)
            self.untimed |= missing > MAX_DRAFT_TOKENS + 1
        if rows:
            self._run(late, rows)
        return ready

    def _propose_next(self, drafts: Sequence[_Draft]) -> None:
        rows = [draft.row(draft.missing() + len(draft.draft_tokens)) for draft in drafts]
        for draft, tokens in zip(drafts, self._run(drafts, rows), strict=True):
            draft.draft_tokens += tokens
            if tokens and self._ends(draft, tokens[-1]):
                draft.target = len(draft.draft_tokens)

    def _ends(self, draft: _Draft, token: int) -> bool:
        generated = draft.sequence.generated + len(draft.draft_tokens)
        return bool(finish_reason(draft.params, self._eos, token, generated)[0])

    def _run(self, drafts: Sequence[_Draft], rows: Sequence[PlanRow]) -> list[list[int]]:
        """Return the tokens sampled for each row; after NaN none, and those drafts stop."""
        try:
            results = self._runner.execute(StepPlan(tuple(rows)))
        except NumericsError as error:
            for index in error.rows or range(len(rows)):
                drafts[index].broken = True
            return [[] for _ in rows]
        for draft, row in zip(drafts, rows, strict=True):
            draft.computed += row.tokens
        return [[sampled.token for sampled in row_results] for row_results in results]
