"""What feeds the prefix index goes on after a fault."""

import asyncio

from registry.types import Snapshot
from router.placement import index_feed
from router.placement.prefix_index import PrefixIndex
from telemetry.metrics import Metrics
from tests.router.conftest import until

SNAPSHOT = Snapshot(incarnation=b"i" * 16, sequence=1, packed=b"h" * 16)


class Stumbling:
    """Raises at the first look."""

    def __init__(self) -> None:
        self.looks = 0

    def want(self, incarnation: bytes) -> None:
        pass

    async def __aiter__(self):
        self.looks += 1
        if self.looks == 1:
            raise ValueError("an event that nobody can read")
        yield SNAPSHOT
        await asyncio.sleep(3600)


async def test_a_source_that_raises_once_is_read_again():
    """Defect 3: the feeder's task ended unheard, and routing went by load alone for good."""
    index, metrics = PrefixIndex(), Metrics("router", model="m")
    feeder = index_feed.IndexFeeder(index, Stumbling(), metrics)
    feeder.start()
    await until(lambda: index.total_hashes == 1)
    await feeder.close()
    assert metrics.value("baton_task_failures", task="prefix index") == 1
