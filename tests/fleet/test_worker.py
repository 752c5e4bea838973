"""A worker that is stopped while its model loads ends cleanly, with and without Ray around it."""

import asyncio
import os
import signal

import msgspec
import psutil
import pytest

from engine.settings import EngineSettings
from fleet.pools import ray_worker
from fleet.pools.ray_worker import WorkerActor
from fleet.worker import WorkerSettings, serve

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
    monkeypatch.setattr(ray_worker, "log_to", lambda _: None)
    before = children()
    actor = WorkerActor("fleet.worker", msgspec.to_builtins(SETTINGS))
    starting = asyncio.create_task(actor.start())
    await engine_started(before)
    await actor.stop()
    with pytest.raises(RuntimeError, match="before it was ready"):
        await starting
    assert children() == before
