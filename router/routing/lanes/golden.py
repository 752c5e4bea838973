"""Comparison of answers to golden prompts. Pure."""

import json
import re
from dataclasses import dataclass
from typing import Any

from baton.types.gates import GoldenPrompt


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """Answer of one model to a golden prompt: token ids of both, and the answer's text."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


def difference(
    golden: GoldenPrompt, answer: GoldenAnswer, other: GoldenAnswer | None = None
) -> str:
    """Return how an answer differs from the right one; empty if it is right.

    Args:
        golden: Golden prompt.
        answer: Answer of the model.
        other: Answer of the model ``golden.same_as``.
    """
    if golden.regex:
        found = re.search(golden.regex, answer.text)
        return "" if found else f"the text does not match {golden.regex!r}"
    if golden.schema is not None:
        return _schema_problem(golden.schema, answer.text)
    if other is not None:
        if answer.prompt != other.prompt:
            return f"the prompt has other tokens than for {golden.same_as}"
        return _tokens_differ(answer.tokens, other.tokens)
    return _tokens_differ(answer.tokens, golden.tokens)


def _tokens_differ(found: tuple[int, ...], right: tuple[int, ...]) -> str:
    for index, (one, wanted) in enumerate(zip(found, right, strict=False)):
        if one != wanted:
            return f"token {index} is {one} instead of {wanted}"
    if len(found) != len(right):
        return f"the answer has {len(found)} tokens instead of {len(right)}"
    return ""


def _schema_problem(schema: dict[str, Any], text: str) -> str:
    from jsonschema import Draft202012Validator  # import takes 0.1 s and is rarely needed

    try:
        data = json.loads(text)
    except ValueError:
        return "the text is no JSON"
    error = next(Draft202012Validator(schema).iter_errors(data), None)
    return "" if error is None else f"the text does not follow the schema at {error.json_path}"
