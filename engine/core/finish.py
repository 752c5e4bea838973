"""When an answer is over."""

from engine.core.params import SamplingParams


def finish_reason(
    params: SamplingParams, eos: frozenset[int], token: int, generated: int
) -> tuple[str, int | None]:
    """Whether a token just drawn ends its choice.

    Args:
        params: The request's parameters.
        eos: The model's end tokens.
        token: The token drawn.
        generated: Tokens drawn so far, this one included.

    Returns:
        ``("", None)`` to go on, ``("stop", token)`` when the token itself is the end (it is not
        part of the answer), ``("length", None)`` at the limit.

    With a grammar an end token is drawn early, or in spite of ``ignore_eos``, only where nothing
    else may follow; then it does end the answer.
    """
    if params.grammar and token in eos:
        return "stop", token
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and generated > params.min_tokens:
        return "stop", token
    if generated >= params.max_tokens:
        return "length", None
    return "", None
