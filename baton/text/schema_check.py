"""Whether a finished answer fits its schema in what no grammar could follow. Bounded in work.

Only for answers whose client said ``strict: false``. Patterns are left out: the grammar followed
them, and a regular expression of a client must not run here.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any

from baton.text.json_schema import UNFOLLOWED_KEYWORDS

UNCHECKED = "unchecked"
_MAX_CHARACTERS = 64 * 1024  # of an answer
_MAX_STEPS = 5_000  # keywords looked at; about 10 ms
_LEFT_OUT = ("pattern", "patternProperties", "additionalProperties", "format", "$dynamicRef")

_Keyword = Callable[..., Iterator[Any] | None]


class _TooMuchError(Exception):
    """The check was given up."""


def violations(schema: str, answer: str) -> tuple[str, ...]:
    """The keywords that an answer does not keep, each once.

    Args:
        schema: JSON text.
        answer: JSON text, as a grammar of the schema let it through.

    Returns:
        Keywords of ``UNFOLLOWED_KEYWORDS``, or ``("unchecked",)`` if it was too much work, or the
        schema refers to others.
    """
    if len(answer) > _MAX_CHARACTERS:
        return (UNCHECKED,)
    from jsonschema import validators  # a tenth of a second that few routers need
    from referencing.exceptions import Unresolvable

    steps = count()

    def bounded(keyword: _Keyword) -> _Keyword:
        def check(*arguments: Any) -> Iterator[Any]:
            if next(steps) >= _MAX_STEPS:
                raise _TooMuchError
            yield from keyword(*arguments) or ()

        return check

    kinds = {name: bounded(keyword) for name, keyword in _keywords().items()}
    validator = validators.create(meta_schema={}, validators=kinds)(json.loads(schema))
    try:
        errors = validator.iter_errors(json.loads(answer))
        found = {step for error in errors for step in error.absolute_schema_path}
    except (_TooMuchError, RecursionError, ValueError, TypeError, Unresolvable):
        return (UNCHECKED,)
    return tuple(sorted(found & UNFOLLOWED_KEYWORDS))


@cache
def _keywords() -> dict[str, _Keyword]:
    from jsonschema import Draft202012Validator, ValidationError

    def unique_items(_: Any, unique: Any, items: Any, __: Any) -> Iterator[Any]:
        if unique is True and isinstance(items, list):
            written = {json.dumps(item, sort_keys=True) for item in items}
            if len(written) < len(items):
                yield ValidationError("an item is there twice")

    kept: dict[str, _Keyword] = dict(Draft202012Validator.VALIDATORS)
    for name in _LEFT_OUT:
        kept.pop(name, None)
    kept["uniqueItems"] = unique_items
    return kept
