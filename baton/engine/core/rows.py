"""Rows of a step's plan: the tokens that a sequence computes next, and what is sampled of them."""

from baton.engine.core.plan import PlanRow, SampleSpec
from baton.engine.core.sequence import TokenSequence


def decode_row(sequence: TokenSequence, block_tokens: int) -> PlanRow:
    """Return the row that computes the newest token."""
    if not sequence.samples:  # they hold the list of tokens, not its length
        sequence.samples = _samples(sequence)
    start = sequence.computed
    adapter = sequence.request.spec.adapter
    return PlanRow(
        sequence_id=sequence.sequence_id,
        tokens=sequence.tokens[start:],
        start=start,
        block_ids=sequence.blocks[: start // block_tokens + 1],
        samples=sequence.samples,
        adapter=adapter.digest if adapter else "",
    )


def prompt_row(sequence: TokenSequence, budget: int, block_tokens: int) -> PlanRow:
    """Return the next chunk of a sequence; it ends at a block boundary or at the end."""
    start = sequence.computed
    end = len(sequence.tokens)
    prompt_outputs = sequence.prompt_outputs
    if prompt_outputs is not None:
        budget //= prompt_outputs.token_cost
    if end - start > budget:
        end = (start + budget) // block_tokens * block_tokens
        end = max(end, (start // block_tokens + 1) * block_tokens)
    end = min(end, len(sequence.tokens))
    adapter = sequence.request.spec.adapter
    return PlanRow(
        sequence_id=sequence.sequence_id,
        tokens=sequence.tokens[start:end],
        start=start,
        block_ids=sequence.blocks[: -(-end // block_tokens)],
        samples=_samples(sequence) if end == len(sequence.tokens) else (),
        adapter=adapter.digest if adapter else "",
        prompt_outputs=prompt_outputs,
    )


def _samples(sequence: TokenSequence) -> tuple[SampleSpec, ...]:
    request = sequence.request
    first = sequence.generated == 0
    if request.spec.pooling:
        return ()
    choices = sorted(request.live_choices) if first else [sequence.choice]
    if first:
        sequence.choice = choices[0]
    return tuple(
        SampleSpec(
            choice=choice,
            params=request.spec.params,
            history=sequence.tokens,
            prompt_tokens=len(request.prompt),
        )
        for choice in choices
    )
