"""Delay of later requests by a second of computing. Sans-IO.

A prompt that is computed again, because its request went where it was not cached, delays not only
that request but every request that finds the worker busy. In a queue that is busy for a share rho
of its time, one more second of work makes later arrivals wait rho / (1 - rho) seconds longer, all
together. So in a busy pool a cached prefix is worth more than the time that its own request saves,
and in an idle pool exactly that.

And what a worker computes displaces as much in its cache. Of that, later requests need about the
share that prompts find cached now, and compute it again. Sessions need all of theirs: if a share c
of later turns is continued, a second of work causes c + c² + … = c / (1 - c) more. Beginnings are
priced by the cached share alone, because a copy of a common prefix serves later sessions.

The shares are one for all workers of a role. A worker's own share would follow noise: a worker that
has just been avoided looks idle, and attracts the next prompts, cached there or not.
"""

from collections.abc import Mapping
from math import exp

_WINDOW_NS = 60e9  # the mean forgets a sample within about this time
_IDLE_BEFORE_NS = 3e9  # time before the first sample, in which the workers count as idle
_CACHED_WEIGHT = 0.02  # of one prompt in the mean of their cached shares
_MAX_BUSY_SHARE = 0.9  # above it a queue is not in balance, and the formula has no meaning
_MAX_CONTINUED_SHARE = 0.8  # no mean of some twenty turns shows that fewer sessions end


class Crowding:
    """Busy share of the workers of each role with prompts: a mean over the last minute."""

    def __init__(self) -> None:
        self._busy_share: dict[str, float] = {}
        self._at_ns: int | None = None
        self._sampled_ns = _IDLE_BEFORE_NS
        self._cached_share = 0.0
        self._continued_share = _MAX_CONTINUED_SHARE

    def note(self, workers: Mapping[str, tuple[int, int]], now_ns: int) -> None:
        """Add a sample: by role, the number of workers with prompt tokens to compute, and of all.

        A sample counts for the time since the previous one, so that a burst does not count for more
        than its duration.
        """
        since_ns = 0 if self._at_ns is None else max(now_ns - self._at_ns, 0)
        self._at_ns = now_ns
        self._sampled_ns = min(self._sampled_ns + since_ns, _WINDOW_NS)
        weight = 1 - exp(-since_ns / self._sampled_ns)
        for role, (busy_workers, all_workers) in workers.items():
            before = self._busy_share.get(role, 0.0)
            self._busy_share[role] = before + weight * (busy_workers / all_workers - before)

    def placed(self, prompt_tokens: int, uncached_tokens: int, continued_share: float) -> None:
        """Add the cached share of a prompt; set the share of later turns that are continued."""
        share = 1 - uncached_tokens / max(prompt_tokens, 1)
        self._cached_share += _CACHED_WEIGHT * (share - self._cached_share)
        self._continued_share = min(continued_share, _MAX_CONTINUED_SHARE)

    def busy_share(self, role: str) -> float:
        """Return the busy share of a role in the last minute, between 0 and 1."""
        return self._busy_share.get(role, 0.0)

    def wait_per_s(self, role: str, continues: bool = False) -> float:
        """Return the delay of later requests per second computed on a worker of the role.

        The prompt may be the beginning of a session, or one that ``continues`` it.
        """
        busy = min(self.busy_share(role), _MAX_BUSY_SHARE)
        continued = self._continued_share
        again = continued / (1 - continued) if continues else self._cached_share
        return busy / (1 - busy) + again
