"""Delay of writes to streams while the router's event loop is overloaded. No I/O.

A write costs the same for one token as for three. Normally each token is written immediately. Under
overload the next pass over the streams is delayed by some milliseconds, so that each write sends
more tokens. The delay grows up to `LONGEST_NS` during overload, and shrinks afterwards.
"""

LONGEST_NS = 24_000_000
_STEP_NS = 1_000_000
_WINDOW_NS = 30_000_000  # measurements of CPU time over shorter windows are unreliable
_OVERLOADED = 0.9  # of one core
_BUSY = 0.8
_IDLE = 0.5


class Pace:
    """Controller of the delay, by the CPU time of the loop's thread.

    Attributes:
        hold_ns: Delay of the next pass after the first new token.
    """

    def __init__(self) -> None:
        self.hold_ns = 0
        self._since_ns = 0
        self._spent_ns = 0

    def passed(self, now_ns: int, cpu_ns: int) -> None:
        """Update the delay at the end of a pass. ``cpu_ns`` is the thread's total CPU time."""
        window_ns = now_ns - self._since_ns
        if window_ns < _WINDOW_NS:
            return
        busy = (cpu_ns - self._spent_ns) / window_ns
        self._since_ns = now_ns
        self._spent_ns = cpu_ns
        if busy > _OVERLOADED:
            self.hold_ns = min(self.hold_ns + 2 * _STEP_NS, LONGEST_NS)
        elif busy < _IDLE:
            self.hold_ns = 0
        elif busy < _BUSY:
            self.hold_ns = max(self.hold_ns - _STEP_NS, 0)
