"""What is damaged in Redis, or of another version, is left out: all else is read as before."""

import asyncio
import os

import pytest

from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemand, RouterDemands
from baton.registry.types import WorkerRecord
from baton.registry.workers import RegistryWatcher
from tests.registry.conftest import Reader, eventually

FIRST = bytes(16)  # before all others in any order


async def empty_name(registry: Registry) -> None:
    await registry.send(("ZADD", registry.key("kv:live"), 1, b""))


async def long_name(registry: Registry) -> None:
    await registry.send(("ZADD", registry.key("kv:live"), 1, b"x" * 17))


async def another_mark(registry: Registry, mark: str = "v9 of something") -> None:
    stem = registry.key("kv", FIRST.hex())
    live = ("ZADD", registry.key("kv:live"), 1, FIRST)
    await registry.send(live, ("SET", stem + b":mark", mark))


async def damaged_set(registry: Registry) -> None:
    await another_mark(registry, "1 5")
    stem = registry.key("kv", FIRST.hex())
    await registry.send(("RPUSH", stem + b":blocks", b"abc"))


async def damaged_entry(registry: Registry) -> None:
    await another_mark(registry, "1 0")
    fields = ("k", "b", "s", b"x" * 17, "r", b"", "c", 0)

    async def later() -> None:  # when the reader has met FIRST
        await asyncio.sleep(0.5)
        await registry.send(registry.blocks.streams.append(FIRST, "n", 2, *fields))

    await asyncio.gather(later())


@pytest.mark.parametrize(
    "damage", [empty_name, long_name, another_mark, damaged_set, damaged_entry]
)
async def test_the_feed_goes_on_beside_what_is_damaged(
    registry: Registry, damage, monkeypatch
) -> None:
    """One record blinded every router's index for as long as it was there."""
    monkeypatch.setattr("baton.registry.event_feed.REFRESH_S", 0.1)
    incarnation, block_hash = os.urandom(15) + b"\1", os.urandom(16)
    publisher = KvEventPublisher(registry, incarnation)
    publisher.start()
    damages = asyncio.create_task(damage(registry))
    await asyncio.sleep(0.1)
    reader = Reader(registry)
    await eventually(lambda: damages.done())
    await asyncio.sleep(0.6)  # each mark is read in two of these
    publisher.publish(stored=[block_hash])
    await eventually(lambda: block_hash in reader.hashes.get(incarnation, ()))
    assert not reader.task.done()
    await reader.close()
    await publisher.stop()


async def test_names_that_are_no_text_hide_no_others(registry: Registry) -> None:
    record = WorkerRecord(worker_id="decode-0", role="decode", state="ready", epoch=1)
    await registry.register(record)
    for kind in ("slots", "routers"):
        key = registry.key(kind)
        await registry.send(
            ("SADD", key, b"\xff\xfe") if kind == "slots" else ("HSET", key, b"\xff\xfe", "{}")
        )
    skipped: list[str] = []
    registry.on_skipped = skipped.append
    assert [change.worker_id for change in await RegistryWatcher(registry).poll()] == ["decode-0"]
    demands = RouterDemands(registry)
    await demands.exchange("one", RouterDemand(beat=1))
    assert list(await demands.exchange("two", RouterDemand(beat=1))) == ["one"]
    assert skipped == [repr(b"\xff\xfe")]


async def test_a_worker_finds_a_mark_of_another_version_and_writes_its_own(registry: Registry):
    await another_mark(registry)
    assert await registry.blocks.refresh(FIRST) is None
