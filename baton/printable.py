"""Text of others in logs and terminals, which control characters would let them forge or steer."""

import re
from typing import Any

UNPRINTABLE = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and newline, marks that reverse text, and halves of characters."""


def printable(text: str) -> str:
    r"""Return a text with its unprintable characters as escapes, such as ``\x1b``."""
    return UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_json(value: Any) -> Any:
    """Return data of JSON whose texts are printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_json(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): printable_json(each) for name, each in value.items()}
    return value
