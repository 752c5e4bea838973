"""Numbers beyond doubles in schemas and arguments: JSON writes them, msgspec does not."""

import math
from typing import Any

import msgspec


def encodable(value: Any) -> Any:
    """Return JSON in which a number that was read as infinite is written as a large one."""
    if isinstance(value, dict):
        return {key: encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if value in (math.inf, -math.inf):
        return msgspec.Raw(b"1e999" if value > 0 else b"-1e999")
    return value
