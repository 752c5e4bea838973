"""Submissions that must not run if they still arrive.

A long prompt travels in a call of its own. A Cancel, or a Resume that was answered with "not held",
can overtake it. Its router has already given it up, and would never end it.
"""

from collections import OrderedDict

from baton.types.errors import BatonError

KEEP_NS = 60_000_000_000
MAX_TOMBSTONES = 4096

Key = tuple[str, int]  # request, attempt


class Tombstones:
    """Tombstones of the last ``MAX_TOMBSTONES`` requests, each kept for ``KEEP_NS``."""

    def __init__(self) -> None:
        self._graves: OrderedDict[Key, tuple[int, BatonError]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, key: Key, error: BatonError, now_ns: int) -> None:
        """Refuse this submission with ``error``, if it arrives."""
        self._graves[key] = now_ns, error
        self._graves.move_to_end(key)
        if len(self._graves) > MAX_TOMBSTONES:
            self._graves.popitem(last=False)

    def find(self, key: Key) -> BatonError | None:
        """Return why a submission must not run; None if it may."""
        grave = self._graves.get(key)
        return grave[1] if grave else None

    def tick(self, now_ns: int) -> None:
        """Remove tombstones that have expired."""
        while self._graves:
            key, (buried_ns, _) = next(iter(self._graves.items()))
            if now_ns - buried_ns < KEEP_NS:
                return
            del self._graves[key]
