"""Delay of writes to streams while the router's event loop is overloaded. No I/O.

A write costs the same for one token as for three. Normally each token is written immediately. If
other work comes first, the next passes over the streams are delayed by about twice its time, so
that each write sends more tokens, and first tokens do not wait behind later ones.
"""

LONGEST_NS = 100_000_000
_USUAL_NS = 2_000_000  # twice the other work in a turn of a loop that keeps up


class Pace:
    """Controller of the delay, by the CPU time of the loop's thread.

    Attributes:
        hold_ns: Delay of the next pass after the first new token.
    """

    def __init__(self) -> None:
        self.hold_ns = 0

    def passed(self, spent_ns: int) -> None:
        """Update the delay at a pass; ``spent_ns`` is the CPU time since its first new token."""
        if 2 * spent_ns < self.hold_ns:  # the loop had nothing to do
            self.hold_ns = 0
            return
        late_ns = max(spent_ns - self.hold_ns, 0)
        wanted_ns = min(max(2 * late_ns - _USUAL_NS, 0), LONGEST_NS)
        self.hold_ns += (wanted_ns - self.hold_ns) // 4
