"""Virtual time: what is to happen, in order. Nothing waits, and nothing else tells the time."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Events in the order of their times, and of their scheduling where times are equal."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0  # that have happened
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time_ns: int, call: Callable[[], None]) -> None:
        """Call at that time.

        Raises:
            ValueError: That time is over.
        """
        if time_ns < self.now_ns:
            raise ValueError(f"{time_ns} ns is over: it is {self.now_ns} ns")
        self._scheduled += 1
        heapq.heappush(self._due, (time_ns, self._scheduled, call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call when so much time has passed."""
        self.at(self.now_ns + delay_ns, call)

    def run(self) -> None:
        """Let everything happen, until nothing is left to happen."""
        while self._due:
            self.now_ns, _, call = heapq.heappop(self._due)
            self.events += 1
            call()
