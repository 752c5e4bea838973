"""Which quarantine ends a worker: one that never ends, and not many that follow each other."""

from baton.types.events import StepDone
from baton.types.pool_counts import BlockCounts
from fleet.worker.worker import MANY_QUARANTINED_NS, QUARANTINED_NS, QuarantineWatch

LOOK_NS = 500_000_000


def load(oldest: int, quarantined: int) -> StepDone:
    blocks = BlockCounts(total=100, free=100 - quarantined, quarantined=quarantined)
    return StepDone(blocks=blocks, oldest_quarantine=oldest)


def looks(watch: QuarantineWatch, loads: list[StepDone]) -> int | None:
    """The look at which the worker would end."""
    for number, one in enumerate(loads):
        if watch.stuck(one, number * LOOK_NS):
            return number
    return None


def test_a_minute_of_ordinary_turnover_ends_no_worker() -> None:
    """Some block was in quarantine at each look, never the same: that ended healthy workers."""
    for quarantined in (3, 20):
        assert looks(QuarantineWatch(), [load(n // 2 + 1, quarantined) for n in range(120)]) is None


def test_a_reservation_that_never_drains_ends_it_sooner_if_it_is_large() -> None:
    assert looks(QuarantineWatch(), [load(7, 3)] * 120) == QUARANTINED_NS // LOOK_NS + 1
    assert looks(QuarantineWatch(), [load(7, 20)] * 120) == MANY_QUARANTINED_NS // LOOK_NS + 1
    assert looks(QuarantineWatch(), [load(0, 0)] * 120) is None
