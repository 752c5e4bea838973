"""A Redis that answers reads and refuses writes: records expire one after the other."""

import contextlib

import msgspec
import pytest
import redis

from baton.registry.redis_store import Registry
from baton.registry.workers import Presence, RegistryWatcher
from fleet.local.redis_server import EmbeddedRedis
from tests.router.conftest import process_of, record_of, until
from tests.router.emulated_worker import EmulatedWorker, Script
from tests.router.placement.test_registry_and_index import place


@pytest.mark.slow
async def test_requests_work_after_the_records_expired_in_a_full_redis(model, monkeypatch):
    """Defect 2: ten seconds after Redis was full the router hung up on every healthy worker."""
    monkeypatch.setattr("baton.registry.redis_store.WORKER_TTL_S", 0.5)
    monkeypatch.setattr("baton.registry.workers.FORGET_AFTER_S", 0.2)
    monkeypatch.setattr("baton.registry.workers.HEARTBEAT_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        server = EmbeddedRedis()
        server.start()
        stack.callback(server.stop)
        registry = Registry(server.url, "test")
        stack.push_async_callback(registry.close)
        worker = await EmulatedWorker("decode-0", "decode", Script(step_s=0)).start()
        stack.push_async_callback(worker.stop)
        record = record_of("decode-0", worker.address)
        presence = Presence(
            registry, msgspec.structs.replace(record, incarnation=worker.incarnation)
        )
        presence.start()
        stack.push_async_callback(presence.stop)
        watcher = RegistryWatcher(registry)
        router = process_of(model, watcher)
        await stack.enter_async_context(router.running())
        workers = router.lanes.first.gateway.workers
        await until(lambda: len(workers.usable) == 1)

        raw = stack.enter_context(redis.Redis.from_url(server.url))
        raw.config_set("maxmemory-policy", "noeviction")
        raw.config_set("maxmemory", 1)
        await until(lambda: not presence.connected)
        await until(lambda: not watcher.workers)
        assert await place(router, 2) == ["decode-0"] * 2

        raw.config_set("maxmemory", 0)
        await until(lambda: "decode-0" in watcher.workers)
        assert await place(router, 1) == ["decode-0"]
