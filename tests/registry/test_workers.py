"""The list of workers: who writes what, and that it outlives Redis."""

import asyncio
import secrets
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import redis

from baton.registry import worker_blocks
from baton.registry.admin_commands import AdminCommands
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import EventBatch, WorkerRecord
from baton.registry.workers import (
    FORGET_AFTER_S,
    REFILL_S,
    WHOLE_S,
    Presence,
    RegistryWatcher,
    merged,
)
from fleet.local.redis_server import EmbeddedRedis
from tests.registry.conftest import eventually


def worker(worker_id: str = "decode-0", **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        worker_id=worker_id,
        role="decode",
        state="ready",
        epoch=1,
        incarnation=secrets.token_bytes(16),
        pid=4711,
        address="127.0.0.1:50051",
    )
    return msgspec.structs.replace(record, **changes)


async def test_a_watcher_sees_a_worker_come_change_and_leave(registry: Registry) -> None:
    watcher = RegistryWatcher(registry)
    presence = Presence(registry, worker())
    assert await watcher.poll() == []
    presence.start()
    await eventually(lambda: presence.connected)
    (came,) = await watcher.poll()
    assert came.before is None
    assert came.after is not None and came.after.state == "ready"

    presence.update("draining", reason="scale-in")
    await asyncio.sleep(0.1)
    (changed,) = await watcher.poll()
    assert changed.after is not None
    assert (changed.after.state, changed.after.reason) == ("draining", "scale-in")
    assert await watcher.poll() == [], "a refreshed heartbeat is no change"
    await presence.stop()
    assert (await registry.records())[1] == {}


async def test_an_emptied_redis_heals_without_anyone_being_dropped(
    redis_server: EmbeddedRedis, registry: Registry
) -> None:
    watcher, presence = RegistryWatcher(registry), Presence(registry, worker())
    presence.start()
    await eventually(lambda: presence.connected)
    await watcher.poll()

    redis_server.kill()
    assert await watcher.poll() == []
    assert not watcher.connected
    assert list(watcher.workers) == ["decode-0"]
    await eventually(lambda: not presence.connected)

    redis_server.start()
    assert await watcher.poll() == [], "still on the list while Redis is empty"
    await eventually(lambda: presence.connected)
    assert list((await registry.records())[1]) == ["decode-0"]
    await presence.stop()


async def test_the_last_known_list_survives_a_restart_without_redis(
    redis_server: EmbeddedRedis, registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / "workers.json"
    await registry.register(worker())
    await RegistryWatcher(registry, file).poll()
    redis_server.kill()

    restarted = RegistryWatcher(registry, file)
    (change,) = await restarted.poll()
    assert change.after is not None and change.after.address == "127.0.0.1:50051"
    assert not restarted.connected


async def test_an_emptied_redis_takes_nobody_off_the_list_for_a_minute(
    redis_server: EmbeddedRedis, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a thousand workers need to come back."""
    now_s = [1000.0]
    monkeypatch.setattr("baton.registry.workers.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watcher = RegistryWatcher(registry)
    await registry.birth()
    await registry.register(worker())
    assert len(await watcher.poll()) == 1
    redis_server.kill()
    redis_server.start()
    for _ in range(3):
        assert await watcher.poll() == []
        await registry.birth()
        now_s[0] += FORGET_AFTER_S
    now_s[0] += REFILL_S
    (change,) = await watcher.poll()
    assert change.after is None


async def test_a_list_that_nobody_changed_is_not_read_four_times_a_second(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, reads, records = [1000.0], [], registry.records

    async def counted():
        reads.append(now_s[0])
        return await records()

    monkeypatch.setattr("baton.registry.workers.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(registry, "records", counted)
    watcher, record = RegistryWatcher(registry), worker()
    await registry.register(record)
    assert len(await watcher.poll()) == 1
    await registry.heartbeat(record)
    assert await watcher.poll() == [] and len(reads) == 1, "a heartbeat is no news"
    await registry.write_slots([msgspec.structs.replace(record, state="draining")])
    assert len(await watcher.poll()) == 1 and len(reads) == 2
    now_s[0] += WHOLE_S
    assert await watcher.poll() == [] and len(reads) == 3, "a change that nobody told is found"


async def test_a_silent_worker_leaves_the_list_after_a_while(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.registry.workers.FORGET_AFTER_S", 0.1)
    watcher = RegistryWatcher(registry)
    await registry.register(worker())
    await watcher.poll()
    await registry.deregister(worker())
    assert await watcher.poll() == []
    await asyncio.sleep(0.15)
    (change,) = await watcher.poll()
    assert change.after is None and watcher.workers == {}


async def test_connecting_to_nothing_is_one_typed_error() -> None:
    with pytest.raises(RegistryUnavailableError):
        await Registry("redis://127.0.0.1:1/0", "test").birth()


async def test_a_connection_counts_the_calls_that_failed(
    registry: Registry, redis_server: EmbeddedRedis
) -> None:
    assert not registry.connected
    await registry.birth()
    assert (registry.connected, registry.errors) == (True, 0)
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(RegistryUnavailableError):
            await registry.birth()
    assert (registry.connected, registry.errors) == (False, 2)


def test_the_later_life_of_a_slot_wins() -> None:
    old, new = worker(epoch=1), worker(epoch=2, state="starting", incarnation=b"")
    assert merged({"decode-0": new}, {"decode-0": old}) == {"decode-0": new}
    assert merged({"decode-0": old}, {"decode-0": new}) == {"decode-0": new}


def test_within_a_life_the_controller_knows_of_death_and_the_worker_of_its_address() -> None:
    alive = worker()
    slot = worker(state="dead", reason="exit code -9", incarnation=b"", pid=0, address="")
    both = merged({"decode-0": slot}, {"decode-0": alive})["decode-0"]
    assert (both.state, both.reason, both.pid) == ("dead", "exit code -9", 4711)
    starting = worker(state="starting", incarnation=b"")
    assert merged({"decode-0": starting}, {"decode-0": alive})["decode-0"] is alive


def test_the_role_is_that_of_the_later_turn_whoever_has_it() -> None:
    """The worker's record lags behind the controller's, and outlives it when Redis is emptied."""
    before, after = worker(turn=3), worker(role="prefill", turn=4)
    for slot, own in ((after, before), (before, after)):
        found = merged({"w": slot}, {"w": own})["w"]
        assert (found.role, found.turn, found.incarnation) == ("prefill", 4, own.incarnation)
    assert merged({}, {"w": after})["w"].role == "prefill"
    restarted = worker(role="prefill", turn=4, epoch=2)
    assert merged({"w": worker(turn=5)}, {"w": restarted})["w"].role == "decode"


async def test_a_record_of_a_future_version_is_skipped_named_and_counted(
    registry: Registry, redis_server: EmbeddedRedis, caplog
) -> None:
    """Defect 3: one rolling upgrade must not blind the routers."""
    skipped: list[str] = []
    registry.on_skipped = skipped.append
    watcher = RegistryWatcher(registry)
    await registry.register(worker("decode-0"))
    strange = {**msgspec.to_builtins(worker("decode-1")), "role": "verify"}
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.set("baton:{test}:worker:decode-1", msgspec.msgpack.encode(strange), px=10_000)
        raw.set("baton:{test}:slot:decode-2", b"\xff not msgpack", px=10_000)
        raw.sadd("baton:{test}:slots", "decode-1", "decode-2")
    for _ in range(3):
        await watcher.poll()
    assert list(watcher.workers) == ["decode-0"]
    assert sorted(skipped) == ["decode-1", "decode-2"]  # once each, not once per look
    assert "decode-1" in caplog.text
    await registry.register(worker("decode-3"))
    assert [change.worker_id for change in await watcher.poll()] == ["decode-3"]


async def test_many_slots_are_written_at_once_and_many_calls_wait_for_a_connection(
    registry: Registry,
) -> None:
    """Defect 11: with more than eight workers some records were never written."""
    many = [worker(f"prefill-{n}") for n in range(40)]
    await registry.write_slots(many[:20])
    await asyncio.gather(*(registry.write_slots([one]) for one in many[20:]))
    slots, _ = await registry.records()
    assert len(slots) == 40


async def test_a_host_whose_clock_is_ahead_takes_nobody_off_the_index(
    registry: Registry, monkeypatch
) -> None:
    """Defect 12: only Redis' own clock lets an incarnation expire."""
    await registry.blocks.publish(
        EventBatch(incarnation=b"a" * 16, sequence=1, stored=(b"n" * 16,)), 0
    )
    monkeypatch.setattr(worker_blocks, "_now_ms", lambda: (time.time_ns() // 10**6) + 3_600_000)
    await registry.blocks.publish(EventBatch(incarnation=b"b" * 16, sequence=1, stored=()), 0)
    await registry.blocks.refresh(b"b" * 16)
    live = [part async for part in registry.blocks.marks(await registry.blocks.refreshes())]
    assert set().union(*live) == {b"a" * 16, b"b" * 16}


async def test_a_loop_over_redis_hears_its_cancel_wherever_it_is(
    redis_server: EmbeddedRedis,
) -> None:
    """redis-py loses a cancel that comes while it writes, where it has a timeout for that."""

    async def poll(orders: AdminCommands) -> None:
        while True:
            await orders.take()

    for steps in range(0, 40, 3):
        registry = Registry(redis_server.url, f"cancel-{steps}")
        task = asyncio.create_task(poll(AdminCommands(registry)))
        await asyncio.sleep(0.05)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
        heard = task.done()
        while not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=0.1)
        await registry.close()
        assert heard, steps
