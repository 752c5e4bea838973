"""A worker that is stopped while its model loads ends cleanly, with and without Ray around it."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.addresses import split_address
from baton.engine.settings import EngineSettings
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools import ray_worker
from fleet.pools.liveness import ShellProcess
from fleet.pools.ray_worker import WorkerActor
from fleet.worker.worker import WorkerSettings, serve

SETTINGS = WorkerSettings(
    worker_id="decode-0",
    role="decode",
    epoch=1,
    fleet="test",
    served_model_name="emulated",
    engine=EngineSettings(model="emulated"),
    redis_url="redis://127.0.0.1:1",
    fleet_token="t",
)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


async def engine_started(before: set[int]) -> None:
    async with asyncio.timeout(30):
        while not children() - before:
            await asyncio.sleep(0.01)


async def test_a_signal_while_the_model_loads_ends_the_worker_with_exit_code_0() -> None:
    before = children()
    serving = asyncio.create_task(serve(SETTINGS))
    await engine_started(before)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert children() == before


async def test_an_actor_that_is_stopped_while_the_model_loads_leaves_no_process_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_worker, "log_to", lambda *_, **__: None)
    before = children()
    actor = WorkerActor("fleet.worker.worker", msgspec.to_builtins(SETTINGS))
    starting = asyncio.create_task(actor.start())
    await engine_started(before)
    await actor.stop()
    with pytest.raises(RuntimeError, match="before it was ready"):
        await starting
    assert children() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pools_in_memory() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


@pytest.mark.costly
async def test_an_actor_begins_its_next_life_and_keeps_nothing_of_the_last(
    monkeypatch: pytest.MonkeyPatch, redis_server: EmbeddedRedis
) -> None:
    """The engine is killed: another incarnation in the same process, and one KV pool, not two."""
    monkeypatch.setattr(ray_worker, "log_to", lambda *_, **__: None)
    first = msgspec.structs.replace(SETTINGS, redis_url=redis_server.url)
    files_before = open_files()
    actor = WorkerActor("fleet.worker.worker", msgspec.to_builtins(first))
    # One controller died before its word to start was sent, or after; another found the actor.
    raw, again = await asyncio.gather(actor.start(), actor.start())
    assert raw == again
    record = msgspec.msgpack.decode(raw, type=WorkerRecord)
    files_of_a_life = open_files()
    for epoch in (2, 3):
        os.kill(record.pid, signal.SIGKILL)
        assert await actor.wait() == -signal.SIGKILL
        settings = msgspec.to_builtins(msgspec.structs.replace(first, epoch=epoch))
        raw = await actor.begin_next_life(settings)
        last, record = record, msgspec.msgpack.decode(raw, type=WorkerRecord)
        assert record.epoch == epoch
        assert record.incarnation != last.incarnation
        assert msgspec.msgpack.decode(await actor.ping(), type=ShellProcess).epoch == epoch
        assert pools_in_memory() == 1
        assert open_files() <= files_of_a_life + 4
        registry = Registry(redis_server.url, "test")
        assert [r.epoch for r in (await registry.records())[1].values()] == [epoch]
        await registry.close()
    await actor.stop()
    assert open_files() <= files_before + 8


async def test_a_worker_serves_at_an_ipv6_address(
    monkeypatch: pytest.MonkeyPatch, redis_server: EmbeddedRedis
) -> None:
    monkeypatch.setattr(ray_worker, "log_to", lambda *_, **__: None)
    here = msgspec.structs.replace(SETTINGS, redis_url=redis_server.url, host="::1")
    actor = WorkerActor("fleet.worker.worker", msgspec.to_builtins(here))
    record = msgspec.msgpack.decode(await actor.start(), type=WorkerRecord)
    try:
        for address in (record.address, record.metrics_address):
            host, port = split_address(address)
            assert host == "::1" and address.startswith("[::1]:")
            socket.create_connection((host, port), 5.0).close()
    finally:
        await actor.stop()
