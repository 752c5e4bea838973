"""Comparison of answers to golden prompts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.types.gates import GoldenPrompt


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """Answer of one model to a golden prompt: token ids of both, and the answer's text."""

    prompt: Sequence[int]
    tokens: tuple[int, ...]
    text: str


def difference(
    golden: GoldenPrompt, answer: GoldenAnswer, other: GoldenAnswer | None = None
) -> str:
    """Return how the tokens of an answer differ from the right ones; empty if they are right.

    ``other``: answer of the model ``golden.same_as``.
    """
    if other is not None:
        if answer.prompt != other.prompt:
            return f"the prompt has other tokens than for {golden.same_as}"
        return _tokens_differ(answer.tokens, other.tokens)
    return _tokens_differ(answer.tokens, golden.tokens)


def _tokens_differ(tokens: tuple[int, ...], right: tuple[int, ...]) -> str:
    for index, (token, wanted) in enumerate(zip(tokens, right, strict=False)):
        if token != wanted:
            return f"token {index} is {token} instead of {wanted}"
    if len(tokens) != len(right):
        return f"the answer has {len(tokens)} tokens instead of {len(right)}"
    return ""
