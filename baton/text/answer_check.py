"""Checks of finished answers by schemas and expressions of clients, in a separate process.

    python -m baton.text.answer_check

A schema can name URLs and files, and a schema or a regular expression can take any time and memory.
Therefore this process can open neither files nor sockets, and its memory and time are limited. At a
limit a check has no result. A check that the timer does not stop ends with the process, which the
router kills (``router/routing/checks/answers.py``).

Frames (``baton/text/confined.py``) on stdin are questions; each is answered by a `AnswerFinding`.
"""

import json
import re
import signal
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import msgspec
from jsonschema import Draft202012Validator, ValidationError, validators
from referencing import Registry
from referencing.exceptions import Unresolvable

from baton.text.confined import forbid_files, limit_process, read_frame, write_frame
from baton.text.json_schema import unenforced

UNCHECKED = "unchecked"
TIME_LIMIT_S = 0.5
MAX_CHARACTERS = 64 * 1024
"""Longest answer whose schema is checked."""

_MEMORY_BYTES = 1 << 30
# Grammars enforce all but the last, for which a grammar is refused.
_LEFT_OUT = ("pattern", "patternProperties", "additionalProperties", "format", "$dynamicRef")


class Conformance(msgspec.Struct, frozen=True, tag=True):
    """Question for the keywords of a schema that an answer violates and no grammar enforces."""

    schema: str
    answer: str


class Match(msgspec.Struct, frozen=True, tag=True):
    """Question whether an answer matches a regular expression or follows a schema."""

    answer: str
    regex: str = ""
    schema: str = ""


class Redaction(msgspec.Struct, frozen=True, tag=True):
    """Question for texts with ``[name]`` in place of each match of a rule, rules in order."""

    rules: dict[str, str]
    texts: list[str]


Question = Conformance | Match | Redaction


class AnswerFinding(msgspec.Struct, frozen=True):
    """Result of a check.

    Attributes:
        texts: Violated keywords, a problem (none if there is none), or redacted texts.
        is_over: Whether the check exceeded a limit, so that there is no result.
    """

    texts: list[str] = []
    is_over: bool = False


class _OverTimeError(BaseException):
    """The check exceeds its time limit."""


def answered(question: Question) -> AnswerFinding:
    """Check an answer, without limits of time and memory."""
    if isinstance(question, Conformance):
        return AnswerFinding(violations(question.schema, question.answer))
    if isinstance(question, Match):
        problem = _problem(question)
        return AnswerFinding([problem] if problem else [])
    return AnswerFinding([_redacted(text, question.rules) for text in question.texts])


def violations(schema: str, answer: str) -> list[str]:
    """Return the keywords that an answer violates and no grammar enforces, each once.

    The result is ``["unchecked"]`` if the schema has references that do not lead into it.
    """
    try:
        given = json.loads(schema)
        errors = _lenient()(given, registry=Registry()).iter_errors(json.loads(answer))
        found = {step for error in errors for step in error.absolute_schema_path}
        return sorted(found.intersection(unenforced(given)))
    except (RecursionError, ValueError, TypeError, Unresolvable):
        return [UNCHECKED]


@cache
def _lenient() -> Any:
    def unique_items(_: Any, unique: Any, items: Any, __: Any) -> Iterator[Any]:
        if unique is True and isinstance(items, list):
            written = {json.dumps(item, sort_keys=True) for item in items}
            if len(written) < len(items):
                yield ValidationError("an item occurs twice")

    kept = dict(Draft202012Validator.VALIDATORS)
    for name in _LEFT_OUT:
        kept.pop(name, None)
    kept["uniqueItems"] = unique_items
    return validators.create(meta_schema={}, validators=kept)


def _problem(question: Match) -> str:
    if question.regex:
        matches = re.search(question.regex, question.answer)
        return "" if matches else f"the text does not match {question.regex!r}"
    try:
        data = json.loads(question.answer)
    except ValueError:
        return "the text is no JSON"
    try:
        validator = Draft202012Validator(json.loads(question.schema), registry=Registry())
        error = next(validator.iter_errors(data), None)
    except Unresolvable as unresolvable:
        return f"the schema has a reference that does not lead into it: {unresolvable}"
    return "" if error is None else f"the text does not follow the schema at {error.json_path}"


def _redacted(text: str, rules: dict[str, str]) -> str:
    for name, rule in rules.items():
        shown = f"[{name}]".replace("\\", r"\\")
        text = re.sub(rule, shown, text)
    return text


def _on_alarm(_: int, __: FrameType | None) -> None:
    raise _OverTimeError


def _within_limits(question: Question) -> AnswerFinding:
    try:
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        try:
            return answered(question)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (_OverTimeError, Exception):  # noqa: BLE001 - odd schemas raise many types
        return AnswerFinding(is_over=True)


def main() -> None:
    """Answer questions until stdin ends."""
    limit_process(_MEMORY_BYTES)
    signal.signal(signal.SIGALRM, _on_alarm)
    answered(Conformance('{"uniqueItems": true}', "[1, 1]"))  # imports all that checks need
    forbid_files()
    write_frame(AnswerFinding())
    while body := read_frame():
        write_frame(_within_limits(msgspec.msgpack.decode(body, type=Question)))


if __name__ == "__main__":
    main()
