"""A worker's next life begins in the same process: nothing of the last one may stay there."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from decode_worker import service
from decode_worker.frame_puller import FramePuller
from decode_worker.handoff import ReceivedHandoff
from fleet.worker.worker import Worker
from tests.workers.harness import (
    MiniRouter,
    WorkerProcess,
    emulated_settings,
    routed,
    worker_here,
    workers,
)

PROMPT = list(range(3, 43))


def mapped_pools() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


async def die_at_work(*, pulls: bool) -> None:
    """One life, which ends while a request runs, or waits for the prefix of a frozen worker."""
    worker = await Worker.start(emulated_settings("decode-0", emulated_token_s=0.05))
    holder = await WorkerProcess.start("decode-1") if pulls else None
    router = MiniRouter(worker)
    await router.connect()
    fields: dict = {"sampling": {"max_tokens": 80}, "deadline_remaining_ns": 600_000_000_000}
    if holder is not None:
        holder.signal_all(signal.SIGSTOP)
        fields["prefix"] = (holder, 2)
    await router.submit("r", PROMPT, **fields)
    if holder is not None:
        await router.until(lambda: worker._parts.engine.load.blocks.in_use)
    else:
        await router.until(lambda: router.tokens["r"])
    os.kill(worker._parts.engine.client.pid, signal.SIGKILL)
    assert await worker.wait() != 0
    await worker.closed()
    await router.drop_stream()
    if holder is not None:
        await holder.stop()


@pytest.mark.parametrize("pulls", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_an_engine_that_dies_at_work_leaves_no_pool_mapped(pulls):
    """The deadline of its request, ten minutes away, kept the pool."""
    before = mapped_pools()
    await die_at_work(pulls=pulls)
    async with asyncio.timeout(10):  # frames of ended tasks go with the next turns of the loop
        while mapped_pools() > before:
            await asyncio.sleep(0.1)


def hand_offs() -> int:
    return sum(type(one) in (ReceivedHandoff, FramePuller) for one in gc.get_objects())


async def test_hand_offs_leave_no_reference_cycles(monkeypatch):
    """Prompts of ended requests stayed in memory until the collector ran."""
    monkeypatch.setattr(service, "REMEMBER_S", 1.0)
    async with (
        workers("prefill-0") as (prefill,),
        worker_here("decode-0") as decode,
        routed(decode) as router,
    ):
        gc.collect()
        before = hand_offs()
        gc.disable()
        try:
            for name in ("a", "b", "c"):
                await router.submit(name, [*PROMPT, ord(name)], prefill)
                await router.ended(name)
                assert router.routes[name].mode == "disaggregated"
            async with asyncio.timeout(10):
                while hand_offs() > before:
                    await asyncio.sleep(0.1)
        finally:
            gc.enable()
