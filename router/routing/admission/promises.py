"""Times at which refused clients may come again. Sans-IO.

    refused ──▶ a time after the work of all before it ──▶ comes then: before new ones
                     ▲                                           └───▶ comes too late: as a new one
                     └── comes before its time: the same time again

A time is worth nothing if new requests fill the fleet until it comes. So new requests find less
room while the work of clients that are about to come is large, and clients that come are judged by
the full limits. Those that do not come leave their room to new requests.

Work is counted at the rate at which this router has placed it lately. So several routers divide the
fleet as they divide its load, without a message.
"""

from collections import deque
from collections.abc import Hashable
from math import exp
from typing import NamedTuple

HOLD_S = 5.0
"""Time for which a client is expected after its time."""

_AHEAD_S = 3.0  # before that time, from which on its work counts
_MOST = 4096  # clients in the book
_MEMORY_S = 30.0  # in which the weight of placed work falls to 1 / e
_SHARE = 0.8  # of the rate that is promised
_LEAST_RATE = 0.1  # of the workers, while few requests have been placed


class _Promise(NamedTuple):
    caller: Hashable
    due_ns: int
    work_s: float


class Promises:
    """Book of one router, in the order of the times."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Promise] = {}
        self._later: deque[_Promise] = deque()
        self._soon: deque[_Promise] = deque()
        self._soon_s = 0.0  # work of those in `_soon` that have not come
        self._last_ns = 0
        self._rate = _Rate()

    def __len__(self) -> int:
        return len(self._kept)

    def placed(self, work_s: float, now_ns: int) -> None:
        """Note that a request was placed, for the rate."""
        self._rate.add(work_s, now_ns)

    def promise(
        self,
        caller: Hashable,
        work_s: float,
        workers: int,
        begin_ns: int,
        now_ns: int,
        most_s: float,
    ) -> float:
        """Return the time in seconds until a refused client should come again.

        ``caller``: name by which it is recognised then. ``work_s``: time to compute its prompt.
        ``workers``: number of workers that compute prompts. ``begin_ns``: earliest time of the
        first client in the book. ``most_s``: longest time. For a later one this time is returned,
        and no room is kept.
        """
        self._pass(now_ns)
        known = self._kept.get(caller)
        if known is not None:
            return max(known.due_ns - now_ns, 0) / 1e9
        rate = _SHARE * min(max(self._rate.per_s(now_ns), _LEAST_RATE * workers), workers)
        due_ns = max(self._last_ns, begin_ns) + round(work_s / max(rate, 1e-3) * 1e9)
        if due_ns - now_ns <= most_s * 1e9 and len(self._later) + len(self._soon) < _MOST:
            self._last_ns = due_ns
            self._kept[caller] = promise = _Promise(caller, due_ns, work_s)
            self._later.append(promise)
        return min((due_ns - now_ns) / 1e9, most_s)

    def due(self, caller: Hashable, now_ns: int) -> bool | None:
        """Return whether the time of a client has come; None if it has none."""
        self._pass(now_ns)
        known = self._kept.get(caller)
        return None if known is None else known.due_ns <= now_ns

    def came(self, caller: Hashable) -> None:
        """Take out a client that has come in its time, or was let in before it."""
        known = self._kept.pop(caller, None)
        if known is not None and self._soon and known.due_ns <= self._soon[-1].due_ns:
            self._soon_s -= known.work_s
        if not self._kept:
            self._later.clear()
            self._soon.clear()
            self._soon_s = 0.0
            self._last_ns = 0

    def pressure(self, now_ns: int) -> float:
        """Return the work that is about to come, as a share of what is placed meanwhile."""
        self._pass(now_ns)
        if not self._kept:
            return 0.0
        return min(max(self._soon_s, 0.0) / max(self._rate.per_s(now_ns) * _AHEAD_S, 1e-9), 1.0)

    def _pass(self, now_ns: int) -> None:
        while self._later and self._later[0].due_ns <= now_ns + _AHEAD_S * 1e9:
            promise = self._later.popleft()
            self._soon.append(promise)
            if self._kept.get(promise.caller) is promise:
                self._soon_s += promise.work_s
        while self._soon and self._soon[0].due_ns <= now_ns - HOLD_S * 1e9:
            promise = self._soon.popleft()
            if self._kept.get(promise.caller) is promise:
                self._soon_s -= promise.work_s
                del self._kept[promise.caller]


class _Rate:
    """Decaying rate of placed work, in seconds per second."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._span_s = 0.0
        self._seen_ns: int | None = None

    def add(self, work_s: float, now_ns: int) -> None:
        self._pass(now_ns)
        self._work_s += work_s

    def per_s(self, now_ns: int) -> float:
        self._pass(now_ns)
        return self._work_s / self._span_s if self._span_s else 0.0

    def _pass(self, now_ns: int) -> None:
        passed_s = max(now_ns - self._seen_ns, 0) / 1e9 if self._seen_ns is not None else 0.0
        self._seen_ns = now_ns
        kept = exp(-passed_s / _MEMORY_S)
        self._work_s *= kept
        self._span_s = self._span_s * kept + _MEMORY_S * (1.0 - kept)
