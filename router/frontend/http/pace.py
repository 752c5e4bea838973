"""How long the streams of a router wait for each other while its loop cannot keep up. Sans-IO.

A write costs the same for one token as for three. While the loop has time, each token is written as
soon as it is here. While it has none, writing is what it can do less often: a pass over the streams
is held back for some milliseconds, and what comes meanwhile goes out in the same writes. As long as
the loop is short of time this grows, to `LONGEST_NS` at most; when it has time again it ends.
"""

LONGEST_NS = 24_000_000
_STEP_NS = 1_000_000
_WINDOW_NS = 30_000_000  # CPU time over less than this says little
_SHORT_OF_TIME = 0.9  # of one core: so busy, the loop is behind
_HAS_TIME = 0.8
_IDLE = 0.5


class Pace:
    """Watches how busy the loop's thread is.

    Attributes:
        hold_ns: The next pass is to begin so much after the first news for it.
    """

    def __init__(self) -> None:
        self.hold_ns = 0
        self._since_ns = 0
        self._spent_ns = 0

    def passed(self, now_ns: int, cpu_ns: int) -> None:
        """A pass is over.

        Args:
            now_ns: Monotonic clock.
            cpu_ns: CPU time of the loop's thread so far.
        """
        window_ns = now_ns - self._since_ns
        if window_ns < _WINDOW_NS:
            return
        busy = (cpu_ns - self._spent_ns) / window_ns
        self._since_ns = now_ns
        self._spent_ns = cpu_ns
        if busy > _SHORT_OF_TIME:
            self.hold_ns = min(self.hold_ns + 2 * _STEP_NS, LONGEST_NS)
        elif busy < _IDLE:
            self.hold_ns = 0
        elif busy < _HAS_TIME:
            self.hold_ns = max(self.hold_ns - _STEP_NS, 0)
