"""Numbers that orjson does not encode: those of schemas and arguments may have any size."""

import math
from typing import Any

import orjson

_LEAST = -(1 << 63)
_MOST = (1 << 64) - 1


def encodable(value: Any) -> Any:
    """Return JSON with larger numbers as fragments, which orjson writes as they are."""
    if isinstance(value, dict):
        return {key: encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    if value in (math.inf, -math.inf):  # read from a number beyond doubles
        return orjson.Fragment("1e999" if value > 0 else "-1e999")
    return value
