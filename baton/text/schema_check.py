"""Check of a finished response against schema keywords that no grammar enforces. Bounded work.

Only for requests with ``strict: false``. Patterns are left out: the grammar enforces them, and a
client's regular expression must not run here.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any

from baton.text.json_schema import UNFOLLOWED_KEYWORDS

UNCHECKED = "unchecked"
_MAX_CHARACTERS = 64 * 1024  # length of a response
_MAX_STEPS = 5_000  # evaluated keywords; about 10 ms
_LEFT_OUT = ("pattern", "patternProperties", "additionalProperties", "format", "$dynamicRef")

_Keyword = Callable[..., Iterator[Any] | None]


class _TooMuchError(Exception):
    """The check exceeds its work limit."""


def violations(schema: str, answer: str) -> tuple[str, ...]:
    """Return the keywords of ``UNFOLLOWED_KEYWORDS`` that a response violates, each once.

    The result is ``("unchecked",)`` if the check takes too much work or the schema has unresolvable
    references.
    """
    if len(answer) > _MAX_CHARACTERS:
        return (UNCHECKED,)
    from jsonschema import validators  # import takes 0.1 s and is rarely needed
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
                yield ValidationError("an item occurs twice")

    kept: dict[str, _Keyword] = dict(Draft202012Validator.VALIDATORS)
    for name in _LEFT_OUT:
        kept.pop(name, None)
    kept["uniqueItems"] = unique_items
    return kept
