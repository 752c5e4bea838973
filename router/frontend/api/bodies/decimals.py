"""Decimals of a schema with more digits than a double holds, which would become other numbers."""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from baton.types.errors import GrammarError

_LONG = re.compile(rb"[0-9][0-9.]{16}|[0-9][eE][-+]?[0-9]{3}")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = ("const", "enum", *_BOUNDS)
_TEXTS = ("messages", "input", "prompt", "system", "metadata")  # fields without schemas


def _decimal(text: str) -> Decimal:
    # In Python, so that the event loop can run between two of a million decimals.
    try:
        return Decimal(text)
    except InvalidOperation:  # the exponent is too large even for it
        return Decimal("NaN")


_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=_decimal)


def refuse_long_decimals(raw: bytes, decoded: Mapping[str, Any] | None = None) -> None:
    """Raise ``GrammarError`` if a value or bound of a schema in a body is such a decimal.

    A long text is not searched if the ``decoded`` body has no place for a schema.
    """
    fields = () if decoded is None else decoded.items()
    if decoded is not None and not any(
        isinstance(value, dict | list) for field, value in fields if field not in _TEXTS
    ):
        return
    if not any(b'"%b"' % keyword.encode() in raw for keyword in _KEYWORDS):
        return
    if _LONG.search(raw) is None:
        return
    try:
        data = _DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return  # what reads the body reports it
    for field, value in data.items() if isinstance(data, dict) else ():
        if field not in _TEXTS:
            for place, number in _inexact(value, field, inside=False):
                raise GrammarError.at(
                    place, f"{number} is no number that a double holds; write a shorter one"
                )


def _inexact(value: Any, place: str, *, inside: bool) -> Iterator[tuple[str, Decimal]]:
    """Yield decimals that a double does not hold; ``inside`` of a keyword."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            within = inside or name in _KEYWORDS
            yield from _inexact(item, f"{place}.{name}", inside=within)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _inexact(item, f"{place}[{index}]", inside=inside)
    elif inside and isinstance(value, Decimal) and Decimal(repr(float(value))) != value:
        yield place, value
