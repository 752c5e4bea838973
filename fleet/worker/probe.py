"""A fixed prompt that a worker runs at intervals, and after a sleep, to check its engine."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.metrics import Metrics
from baton.types import events as ev
from baton.types.errors import InternalError
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens

_PROMPT = tuple(range(100, 124))
_TOKENS = 4
_LOG = logging.getLogger(__name__)

_LOOKS = 10  # within the time without requests


@dataclass(slots=True, kw_only=True)
class EngineProbe:
    """Check of an engine by a request that precedes all others.

    An engine that executes no step while a probe waits is hung. One that responds with NaN is
    broken. ``interval_s`` is the time between two probes, ``limit_s`` the limit for one. If
    ``exact``, all responses must equal the first one. A server that ``counts_errors`` may refuse
    one, such as under load.
    """

    engine: EngineHandle
    interval_s: float
    limit_s: float
    exact: bool
    counts_errors: bool = False
    _expected: tuple[int, ...] | None = None

    async def run(self) -> str:
        """Run probes until one fails, and return the reason. A sleeping engine runs none."""
        await asyncio.sleep(min(1.0, self.interval_s))
        while True:
            if not self.engine.client.holds and (problem := await self.check()):
                return problem
            await asyncio.sleep(self.interval_s)

    async def check(self) -> str:
        """Run one probe, and return what is wrong; empty: nothing."""
        step_before = self.engine.load.step
        tokens, error = await self._run_once()
        if error:
            return "" if self.counts_errors else f"probe: {error}"
        if tokens is None and self.engine.load.step == step_before:
            return f"no engine step for {self.limit_s:.0f} s"
        if tokens is not None and self.exact:
            self._expected = self._expected or tokens
            if tokens != self._expected:
                return f"probe: {tokens} instead of {self._expected}"
        return ""

    async def _run_once(self) -> tuple[tuple[int, ...] | None, str]:
        """Return the tokens of one probe (None: timed out) and its error."""
        tokens: list[int] = []
        ended = asyncio.get_running_loop().create_future()

        def on_report(report: object) -> None:
            if isinstance(report, ev.Tokens):
                tokens.extend(token.token for token in report.tokens)
            elif isinstance(report, ev.Ended) and not ended.done():
                ended.set_result(report.error_message)

        name = f"probe/{secrets.token_hex(8)}"
        command = messages.Submit(
            request_id=name,
            prompt_token_ids=pack_tokens(_PROMPT),
            spec=RequestSpec(
                kind=Kind.FULL,
                params=SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
                hash_seed=bytes(16),
                priority=-1,
                cacheable=False,
            ),
        )
        self.engine.submit(command, on_report, is_probe=True)
        try:
            async with ALIVE.timeout(self.limit_s):
                error = await ended
        except TimeoutError:
            self.engine.client.send_now(messages.Cancel(name))
            return None, ""
        return tuple(tokens), error


async def sleep_when_idle(
    engine: EngineHandle, probe: EngineProbe, idle_s: float, metrics: Metrics
) -> None:
    """Let an engine sleep after ``idle_s`` without requests, and wake it when one comes.

    The memory of its KV pool goes back to the host, its weights stay:

        awake ──no request for idle_s──▶ asleep ──a request──▶ checked ──right──▶ awake
                                                                  └──wrong──▶ failed

    Requests wait in the worker's shell while it is checked by its probe, whose answer must be that
    from before the sleep. Routers move requests away from a worker that fails.

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
