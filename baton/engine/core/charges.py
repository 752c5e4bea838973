"""Division of a step's time among its rows, for the cost of requests. Pure.

A step with prompts and decodes takes as long as a step of the decodes alone, plus the time of the
prompts' tokens. Their parts of the step are in this proportion, or, before both were measured, in
that of their tokens. Each decode has the same part, and each prompt one by its tokens.
"""

from collections.abc import Iterator, Sequence

from baton.engine.core.plan import PlanRow


def divided(
    rows: Sequence[PlanRow], duration_ns: int, token_ns: float, decode_ns: float
) -> list[int]:
    """Return the part of each row in ns; the sum is ``duration_ns``.

    Args:
        rows: Rows of the step.
        duration_ns: Duration of the step.
        token_ns: Usual time of a prompt token; 0: unknown.
        decode_ns: Usual time of a step of decodes alone; 0: unknown.
    """
    decoding = [row.decodes for row in rows]
    decodes = sum(decoding)
    prompt_tokens = 0
    if decodes < len(rows):
        prompts = zip(rows, decoding, strict=True)
        prompt_tokens = sum(row.cost_tokens for row, decodes_now in prompts if not decodes_now)
    per_token = 1.0
    per_decode = 1.0
    if decodes and prompt_tokens and token_ns and decode_ns:
        per_token = token_ns
        per_decode = decode_ns / decodes
    whole = decodes * per_decode + prompt_tokens * per_token
    weights = [
        per_decode if decodes_now else row.cost_tokens * per_token
        for row, decodes_now in zip(rows, decoding, strict=True)
    ]
    return list(_parts(weights, whole, duration_ns))


def _parts(weights: Sequence[float], whole: float, duration_ns: int) -> Iterator[int]:
    """Round parts so that their sum is exact."""
    passed = 0.0
    given_ns = 0
    for weight in weights[:-1]:
        passed += weight
        upto_ns = int(duration_ns * passed / whole)
        yield upto_ns - given_ns
        given_ns = upto_ns
    if weights:
        yield duration_ns - given_ns
