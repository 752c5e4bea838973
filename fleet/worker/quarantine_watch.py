"""Detection of KV blocks that stay in quarantine, which a restart frees. Does no I/O.

Blocks of a revoked reservation stay in quarantine until no writer is left. That is normal under
load; a reservation that never drains is a fault.
"""

from baton.types.events import StepDone

FRACTION = 0.05
MANY_NS = 3_000_000_000  # limit with more than FRACTION of the pool in quarantine
LONG_NS = 30_000_000_000


class QuarantineWatch:
    """Clock of the oldest reservation in quarantine."""

    def __init__(self) -> None:
        self._oldest = 0
        self._since_ns = 0

    def stuck(self, load: StepDone, now_ns: int) -> bool:
        """Return whether a reservation has drained for too long. Call it several times a second."""
        if load.oldest_quarantine != self._oldest:
            self._oldest = load.oldest_quarantine
            self._since_ns = now_ns
        if not self._oldest:
            return False
        many = load.blocks.quarantined > FRACTION * load.blocks.total
        return now_ns - self._since_ns > (MANY_NS if many else LONG_NS)
