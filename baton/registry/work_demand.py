"""Work that clients bring to one router, as the planner of roles reads it. Does no I/O."""

import msgspec


class PromptSum(msgspec.Struct, frozen=True, array_like=True):
    """Sum over prompts. ``context`` is the number of tokens before each token, added up."""

    count: int = 0
    tokens: int = 0
    context: int = 0


class WorkDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one router: sums since its start, and those that wait or run now.

    Attributes:
        arrived: Prompts of all requests, also of those that are refused.
        placed: Prompts of placed requests.
        uncached: The part of these that workers had to compute.
        answers: Responses that have ended.
        answer_tokens: Tokens of all responses, also of those that have not ended.
        waiting: Prompts that are not placed yet.
        computing: Uncached part of prompts that are placed and have yielded no token.
        streams: Sequences that generate.
        stream_tokens: Tokens in the contexts of these.
    """

    arrived: PromptSum = PromptSum()
    placed: PromptSum = PromptSum()
    uncached: PromptSum = PromptSum()
    answers: int = 0
    answer_tokens: int = 0
    waiting: PromptSum = PromptSum()
    computing: PromptSum = PromptSum()
    streams: int = 0
    stream_tokens: int = 0
