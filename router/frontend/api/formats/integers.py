"""Integers that orjson does not encode: those of schemas and arguments may have any size."""

from typing import Any

import orjson

_LEAST = -(1 << 63)
_MOST = (1 << 64) - 1


def encodable(value: Any) -> Any:
    """Return JSON with larger integers as fragments, which orjson writes as they are."""
    if isinstance(value, dict):
        return {key: encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return orjson.Fragment(str(value))
    return value
