"""Commands for Redis, and slices of lists that are too long for one command."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

Command = tuple[Any, ...]
_Item = TypeVar("_Item")

_SLICE = 128  # workers whose keys are read at once: takes less than a millisecond


def slices(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield slices that are small enough not to block the event loop for long."""
    return (items[at : at + _SLICE] for at in range(0, len(items), _SLICE))
