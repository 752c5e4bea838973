"""What feeds the prefix index goes on after a fault."""

import asyncio

from baton.registry.types import EventBatch, Snapshot
from baton.telemetry.metrics import Metrics
from router.routing.placement import index_feed
from router.routing.placement.prefix_index import PrefixIndex
from tests.router.conftest import until
from tests.telemetry.values import value_of

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
    assert value_of(metrics, "baton_task_failures", task="prefix index") == 1


class Backlog:
    """Many items at once."""

    def want(self, incarnation: bytes) -> None:
        pass

    async def __aiter__(self):
        yield SNAPSHOT
        for sequence in range(2, 102):
            stored = (sequence.to_bytes(16, "big"),)
            yield EventBatch(incarnation=SNAPSHOT.incarnation, sequence=sequence, stored=stored)
        await asyncio.sleep(3600)


async def test_a_backlog_lets_the_loop_go_by_time_and_not_by_items(monkeypatch):
    """64 items between two pauses were half a second where each had much to do."""
    turns: list[int] = []
    monkeypatch.setattr(index_feed, "_HOLD_S", 0.0)  # each item took too long
    index = PrefixIndex()
    feeder = index_feed.IndexFeeder(index, Backlog(), Metrics("router", model="m"))
    feeder.start()
    while index.total_hashes < 101:
        turns.append(index.total_hashes)
        await asyncio.sleep(0)
    await feeder.close()
    assert len(set(turns)) > 90, "others had their turn between two items"
