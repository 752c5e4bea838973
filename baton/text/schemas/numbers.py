"""Numbers of a JSON schema that llguidance reads exactly.

llguidance reads numbers as doubles, writes their shortest decimal digits, and clamps bounds to 64
bits. A bound is moved inwards to a number that it reads exactly, so that no value outside is
written. Other numbers that it would change cannot be enforced.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

Schema = dict[str, Any]

_EXACT = 1 << 53  # up to here every integer is a double
_MOST_INTEGER = (1 << 63) - 1024  # largest double of 64 bits
_CLAMPED = (1 << 63) - 1  # read as 2^63, and clamped to itself
_MOST_REAL = 10**18  # larger bounds of numbers do not compile
_REAL_DIGITS = 15  # decimals of so many digits are read exactly
_MOST_COUNT = 1 << 24  # no answer has so many characters, items or properties
_MOST_MULTIPLE = 10**6  # a grammar has a state for each remainder
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_MOST_COUNTS = ("maxLength", "maxItems", "maxProperties")
_LEAST_COUNTS = ("minLength", "minItems", "minProperties")


def narrow(part: Schema) -> None:
    """Replace bounds of a schema by ones that llguidance reads exactly, where there are any."""
    for keyword in (*_MOST_COUNTS, *_LEAST_COUNTS):
        count = part.get(keyword)
        if isinstance(count, float) and count.is_integer():
            part[keyword] = count = int(count)
        if keyword in _MOST_COUNTS and _is_number(count) and count > _MOST_COUNT:
            del part[keyword]
    bounds = {keyword: part[keyword] for keyword in _BOUNDS if _is_number(part.get(keyword))}
    if all(abs(bound) <= _EXACT for bound in bounds.values()):
        return
    found = _integers(bounds) if _is_integer(part) else _reals(bounds)
    if found is not None:
        for keyword in bounds:
            del part[keyword]
        part.update(found)


def changed(part: Schema) -> Iterator[str]:
    """Yield the keywords of a narrowed schema whose numbers llguidance would change."""
    for keyword in ("const", "enum"):
        if keyword in part and not all(map(is_exact, _numbers(part[keyword]))):
            yield keyword
    for keyword in _BOUNDS:
        bound = part.get(keyword)
        if _is_number(bound) and abs(bound) > _EXACT and not _is_readable(part, bound):
            yield keyword
    for keyword in _LEAST_COUNTS:
        least = part.get(keyword)
        if _is_number(least) and least > _MOST_COUNT:
            yield keyword
    divisor = part.get("multipleOf")
    if _is_number(divisor) and divisor > 0 and not _divides(divisor):
        yield "multipleOf"


def is_exact(number: float) -> bool:
    """Return whether llguidance writes this number of ``const`` or ``enum`` unchanged."""
    if number == _CLAMPED:
        return True
    try:
        read = float(number)
    except OverflowError:
        return False
    if not math.isfinite(read) or read == -(1 << 63):
        return False
    shown = Decimal(int(read)) if abs(read) < 1 << 63 and read.is_integer() else Decimal(repr(read))
    return shown == (Decimal(number) if isinstance(number, int) else Decimal(repr(number)))


def literals(schema: Schema) -> list[str]:
    """Return the integers that a schema of nothing else lists, if llguidance would change one."""
    if (
        schema.keys() - {"const", "enum", "type", "$schema", "x-guidance"}
        or len(schema.keys() & {"const", "enum"}) != 1
    ):
        return []
    values = [schema["const"]] if "const" in schema else schema["enum"]
    known = isinstance(values, list) and all(type(value) is int for value in values)
    if not known or schema.get("type", "integer") not in ("integer", "number"):
        return []
    return [] if all(map(is_exact, values)) else [str(value) for value in values]


def _is_integer(part: Schema) -> bool:
    kinds = part.get("type")
    return kinds == "integer" or (
        isinstance(kinds, list) and "integer" in kinds and "number" not in kinds
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    if _is_number(value):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_readable(part: Schema, bound: float) -> bool:
    if _is_integer(part):
        return bound == _CLAMPED or (abs(bound) <= _MOST_INTEGER and float(bound) == bound)
    return abs(bound) <= _MOST_REAL and is_exact(bound) and Decimal(repr(float(bound))) == bound


def _integers(bounds: Schema) -> Schema | None:
    """Return bounds of integers; None if no integer that llguidance reads is within them."""
    low = -_MOST_INTEGER
    high = _CLAMPED
    for keyword, bound in bounds.items():
        is_low = keyword in ("minimum", "exclusiveMinimum")
        if not abs(bound) < math.inf:  # `isfinite` takes no integer beyond the doubles
            if is_low == (bound > 0):
                return None
            continue
        if is_low:
            low = max(low, math.floor(bound) + 1 if keyword != "minimum" else math.ceil(bound))
        else:
            high = min(high, math.ceil(bound) - 1 if keyword != "maximum" else math.floor(bound))
    if low > min(high, _MOST_INTEGER):
        return None
    low = _double(low, up=True)
    high = high if high == _CLAMPED else _double(high, up=False)
    if low > high or low > _MOST_INTEGER:
        return None
    return {"minimum": low, "maximum": high}


def _double(number: int, *, up: bool) -> int:
    """Return the next integer in one direction that is a double; the number itself if it is one."""
    found = int(float(number))
    if found == number or (found > number) == up:
        return found
    return int(math.nextafter(float(number), math.inf if up else -math.inf))


def _reals(bounds: Schema) -> Schema | None:
    """Return bounds of numbers with few digits; None if nothing is within them."""
    found = {}
    for keyword, bound in bounds.items():
        is_low = keyword in ("minimum", "exclusiveMinimum")
        if abs(bound) > _MOST_REAL:
            if is_low == (bound > 0):
                return None
            bound = _MOST_REAL if bound > 0 else -_MOST_REAL
        found[keyword] = _decimal(bound, up=is_low)
    if any(bound > _EXACT for bound in found.values()) and not found.keys() & _BOUNDS_ABOVE:
        found["maximum"] = _MOST_REAL
    if any(bound < -_EXACT for bound in found.values()) and not found.keys() & _BOUNDS_BELOW:
        found["minimum"] = -_MOST_REAL
    lows = [found[keyword] for keyword in _BOUNDS_BELOW if keyword in found]
    highs = [found[keyword] for keyword in _BOUNDS_ABOVE if keyword in found]
    return None if lows and highs and max(lows) > min(highs) else found


_BOUNDS_BELOW = frozenset(("minimum", "exclusiveMinimum"))
_BOUNDS_ABOVE = frozenset(("maximum", "exclusiveMaximum"))


def _decimal(number: float, *, up: bool) -> float:
    if abs(number) <= _EXACT:
        return number
    scale = 10 ** max(len(str(abs(int(number)))) - _REAL_DIGITS, 0)
    whole = math.ceil(number) if up else math.floor(number)
    inside: int = -(-whole // scale) * scale if up else whole // scale * scale
    return inside


def _divides(divisor: float) -> bool:
    """Return whether llguidance reads a divisor, which it scales to an integer, as it is."""
    scaled = float(divisor) if divisor <= _EXACT else math.inf
    digits = 0
    while scaled <= _MOST_MULTIPLE and not scaled.is_integer():
        scaled *= 10
        digits += 1
    return scaled <= _MOST_MULTIPLE and Decimal(scaled).scaleb(-digits) == Decimal(repr(divisor))
