"""What the fleet's tests share: a real Redis, and a reader that keeps what it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from baton.registry.event_feed import EventFeed
from baton.registry.redis_store import Registry
from baton.registry.types import EventBatch, Forget, Heartbeat, Refreshed, Snapshot
from fleet.local.redis_server import EmbeddedRedis


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis()
    server.start()
    yield server
    server.kill()  # a regular stop takes as long as the start
    server.stop()


@pytest.fixture
async def registry(redis_server: EmbeddedRedis) -> AsyncIterator[Registry]:
    made = Registry(redis_server.url, "test")
    yield made
    await made.close()


class Reader:
    """The simplest prefix index: applies what the feed yields, without checks of its own."""

    def __init__(self, registry: Registry) -> None:
        self.feed = EventFeed(registry)
        self.hashes: dict[bytes, set[bytes]] = {}
        self.items: list[object] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async for item in self.feed:
            if isinstance(item, Refreshed):
                continue
            self.items.append(item)
            match item:
                case Snapshot():
                    self.hashes[item.incarnation] = set(item.hashes)
                case EventBatch():
                    held = self.hashes[item.incarnation]
                    held.difference_update(item.removed)
                    held.update(item.stored)
                case Forget():
                    del self.hashes[item.incarnation]
                case Heartbeat():
                    pass

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def reader(registry: Registry) -> AsyncIterator[Reader]:
    made = Reader(registry)
    yield made
    await made.close()


async def eventually(condition: Callable[[], bool], limit_s: float = 8.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)
