"""When pages whose writer cannot be proven to have stopped cost a replica its life. Sans-IO.

Pages of a revoked reservation stay in quarantine until nothing writes into them any more, which
under load happens all the time. Only one that never drains is a fault.
"""

from baton.types.events import StepDone

FRACTION = 0.05
MANY_NS = 3_000_000_000  # with more than that fraction of the pool in quarantine
LONG_NS = 30_000_000_000


class QuarantineWatch:
    """Watches for how long the oldest reservation has been draining."""

    def __init__(self) -> None:
        self._oldest = 0
        self._since_ns = 0

    def stuck(self, load: StepDone, now_ns: int) -> bool:
        """Whether one reservation drains for so long that the replica must start afresh.

        Args:
            load: The engine's last report.
            now_ns: The clock; call it several times a second.
        """
        if load.oldest_quarantine != self._oldest:
            self._oldest = load.oldest_quarantine
            self._since_ns = now_ns
        if not self._oldest:
            return False
        many = load.blocks.quarantined > FRACTION * load.blocks.total
        return now_ns - self._since_ns > (MANY_NS if many else LONG_NS)
