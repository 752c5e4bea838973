"""Submissions that must not run any more, should they still come.

A long prompt travels on a call of its own, so a Cancel, or a Resume that was answered with "not
held", can overtake it. Its router has given it up then, and would never end it.
"""

from collections import OrderedDict

from baton.types.errors import BatonError

KEEP_NS = 60_000_000_000
MAX_TOMBSTONES = 4096

Key = tuple[str, int]  # request, attempt


class Tombstones:
    """The last ``MAX_TOMBSTONES``, each for ``KEEP_NS``."""

    def __init__(self) -> None:
        self._graves: OrderedDict[Key, tuple[int, BatonError]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, key: Key, error: BatonError, now_ns: int) -> None:
        """Refuse this submission with ``error``, if it comes."""
        self._graves[key] = now_ns, error
        self._graves.move_to_end(key)
        if len(self._graves) > MAX_TOMBSTONES:
            self._graves.popitem(last=False)

    def find(self, key: Key) -> BatonError | None:
        """Why a submission must not run; None if it may."""
        grave = self._graves.get(key)
        return grave[1] if grave else None

    def tick(self, now_ns: int) -> None:
        """Forget the old ones."""
        while self._graves:
            key, (buried_ns, _) = next(iter(self._graves.items()))
            if now_ns - buried_ns < KEEP_NS:
                return
            del self._graves[key]
