"""Virtual time for the simulator, the only clock in it."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Queue of events by time, and by order of scheduling for equal times."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0  # events so far
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time_ns: int, call: Callable[[], None]) -> None:
        """Schedule a call at a time that is not past."""
        if time_ns < self.now_ns:
            raise ValueError(f"cannot schedule at {time_ns} ns: the clock is at {self.now_ns} ns")
        self._scheduled += 1
        heapq.heappush(self._due, (time_ns, self._scheduled, call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Schedule a call after a delay."""
        self.at(self.now_ns + delay_ns, call)

    def run(self) -> None:
        """Process events until none is left."""
        while self._due:
            self.now_ns, _, call = heapq.heappop(self._due)
            self.events += 1
            call()
