"""What a second of computing costs those who come later. Sans-IO.

A prompt that is computed once more, because its request went where it was not cached, delays not
only that request: it delays everyone who finds the worker busy. In a queue that is busy for a
share rho of its time, a second of work more makes later arrivals wait rho / (1 - rho) seconds
longer, all of them together. So where a pool is busy a cached prefix is worth more than the
time that its own request saves, and where it is idle exactly that.

The share is one for all workers of a role. One worker's own would chase noise: who has just been
avoided looks idle, and attracts the next prompts, cached there or not.
"""

from collections.abc import Mapping
from math import exp

_FOLLOWS_NS = 60e9  # the mean forgets a sample within about this time
_MOST_BUSY = 0.9  # beyond, a queue is no longer in balance, and the formula has no meaning


class Crowding:
    """How busy the workers of each role are with prompts: a mean over the last minute."""

    def __init__(self) -> None:
        self._busy_share: dict[str, float] = {}
        self._at_ns = 0

    def note(self, workers: Mapping[str, tuple[int, int]], now_ns: int) -> None:
        """How things stand.

        A sample counts for the time since the one before it, so that a burst does not count for
        more than the time that it takes.

        Args:
            workers: By role, how many have prompt tokens to compute, and how many there are.
            now_ns: Monotonic clock.
        """
        weight = 1 - exp(-max(now_ns - self._at_ns, 0) / _FOLLOWS_NS)
        self._at_ns = now_ns
        for role, (busy_workers, all_workers) in workers.items():
            before = self._busy_share.get(role, 0.0)
            self._busy_share[role] = before + weight * (busy_workers / all_workers - before)

    def busy_share(self, role: str) -> float:
        """Of the workers of this role and of the last minute: between 0 and 1."""
        return self._busy_share.get(role, 0.0)

    def wait_per_s(self, role: str) -> float:
        """Seconds that later requests wait longer, for each second computed on such a worker."""
        busy = min(self.busy_share(role), _MOST_BUSY)
        return busy / (1 - busy)
