"""Sleep of an idle worker: the memory of its KV pool goes back to the host, its weights stay.

    awake ──no request for idle_sleep_s──▶ asleep ──a request──▶ checked ──right──▶ awake
                                                                    └──wrong──▶ failed

Requests wait in the worker's shell while it is checked by its probe, whose answer must be that
from before the sleep. Routers move requests away from a worker that fails.
"""

import asyncio
import logging
import time

from baton.engine.process.handle import EngineHandle
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.metrics import Metrics
from baton.types.errors import InternalError
from fleet.worker.probe import EngineProbe

_LOG = logging.getLogger(__name__)

_LOOKS = 10  # within the time without requests


async def sleep_when_idle(
    engine: EngineHandle, probe: EngineProbe, idle_s: float, metrics: Metrics
) -> None:
    """Let an engine sleep after ``idle_s`` without requests, and wake it when one comes.

    Raises:
        InternalError: The engine answers its probe wrongly after a sleep, or not at all.
    """
    while True:
        await _idle(engine, idle_s)
        await _checked(probe)  # so that there is an answer to compare with
        if not await engine.sleep():
            await asyncio.sleep(idle_s / _LOOKS)
            continue
        metrics.set("baton_worker_asleep", 1)
        _LOG.info("gave back the memory of the KV pool after %.0f s without requests", idle_s)
        await engine.client.wanted.wait()
        began_s = time.monotonic()
        await _checked(probe)
        engine.client.release()
        metrics.set("baton_worker_asleep", 0)
        _LOG.info("took the KV pool again and checked it in %.3f s", time.monotonic() - began_s)


async def _idle(engine: EngineHandle, idle_s: float) -> None:
    while True:
        left_s = idle_s - (ALIVE.now_ns() - engine.used_ns) / 1e9
        if left_s <= 0 and not engine.has_work:
            return
        await asyncio.sleep(max(left_s, idle_s / _LOOKS))


async def _checked(probe: EngineProbe) -> None:
    if problem := await probe.check():
        raise InternalError(problem)
