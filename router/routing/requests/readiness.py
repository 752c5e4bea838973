"""Readiness by experiment: a short request through every live pair of workers.

If there are many pairs, a round probes only enough to include every worker once, each with its next
partner in the following round.

The router sets the rate, not its callers: a caller gets the last result, and a new round starts in
the background if that is old. Callers wait for a round only if the workers have changed, or if the
last result is much too old.

A probe requests two tokens: prefill samples the first, and only the second proves the hand-off. A
busy fleet is ready: a probe that timed out counts as failed only if neither worker of the pair has
made a step meanwhile.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, monotonic_ns
from typing import Any

from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import BatonError, DeadlineError
from baton.types.params import SamplingParams
from router.request import GenerationRequest, Pinned
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.gateway import Gateway
from router.settings import ProcessSettings

_AT_ONCE = 4
PROBE_PROMPT = (1, 2, 3)
PROBE_SAMPLING = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
_MANY_PAIRS = 16
_FIRST = -(2**31)  # priority before all others
_PAUSES = 10
_MUCH_TOO_OLD = 3  # multiple of ``probe_every_s``


class Prober:
    """Keeps the last result for ``probe_every_s``; callers share it.

    A result is for one set of workers: when the set changes they are probed again, though not
    sooner than ``probe_pause_s`` after the last round, or ten times its duration if that is less.
    """

    def __init__(self, gateway: Gateway, settings: ProcessSettings, tasks: BackgroundTasks) -> None:
        self._gateway = gateway
        self._settings = settings
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._last: dict[str, Any] = {}
        self._last_s = 0.0
        self._took_s = 0.0  # by the last round
        self._last_incarnations: frozenset[bytes] = frozenset()
        self._round: asyncio.Task[None] | None = None
        self._rounds = 0

    async def check(self, *, first: bool = True) -> dict[str, Any]:
        """Return the state of the fleet: ``ready``, or ``not ready`` with the reasons.

        Probes precede all requests if ``first``; otherwise they take turns.
        """
        every_s = self._settings.probe_every_s
        async with self._lock:
            if self._changed or self._age_s > _MUCH_TOO_OLD * every_s:
                pause_s = min(self._settings.probe_pause_s, every_s, _PAUSES * self._took_s)
                await asyncio.sleep(pause_s - self._age_s if self._last else 0)
                await self._renew(first=first)
            elif self._age_s > every_s and (self._round is None or self._round.done()):
                self._round = self._tasks.spawn(self._renew(first=first), "probe")
            return {**self._last, "age_s": round(self._age_s, 3)}

    @property
    def _age_s(self) -> float:
        return monotonic() - self._last_s

    @property
    def _incarnations(self) -> frozenset[bytes]:
        return frozenset(slot.incarnation for slot in self._gateway.workers.usable)

    @property
    def _changed(self) -> bool:
        return not self._last or self._incarnations != self._last_incarnations

    async def _renew(self, *, first: bool) -> None:
        incarnations = self._incarnations
        began_s = monotonic()
        result = await self._probe_all(_FIRST if first else 0)
        self._last = result
        self._last_s = monotonic()
        self._took_s = self._last_s - began_s
        self._last_incarnations = incarnations

    async def _probe_all(self, priority: int) -> dict[str, Any]:
        starting = [slot.worker_id for slot in self._gateway.workers if slot.state == "starting"]
        expected = {s.role for s in self._gateway.workers if s.state in ("starting", "ready")}
        served = {slot.role for slot in self._gateway.workers.usable}
        self._rounds += 1
        pairs = usable_pairs(self._gateway, self._rounds)
        gate = asyncio.Semaphore(_AT_ONCE)
        results = await asyncio.gather(*(self._probe(pair, gate, priority) for pair in pairs))
        may_be_empty = self._gateway.starts_from_zero
        good = bool(results or may_be_empty) and all(result["ok"] for result in results)
        waits = may_be_empty and not served  # requests are accepted, and start a worker
        ready = good and (expected == served or waits)  # else wait for a pool that is starting
        return {
            "status": "ready" if ready else "not ready",
            "pairs": results,
            "starting": starting,
        }

    async def _probe(self, pair: Pinned, gate: asyncio.Semaphore, priority: int) -> dict[str, Any]:
        async with gate:
            began_ns = monotonic_ns()
            steps = self._steps(pair)
            limit_s = self._settings.probe_timeout_s
            request = pinned_request("probe", PROBE_PROMPT, PROBE_SAMPLING, pair, limit_s)
            request = replace(request, priority=priority)
            error: BatonError | None = None
            try:
                error = (await probed(self._gateway, request)).record.error
            except BatonError as refused:
                error = refused
            busy = isinstance(error, DeadlineError) and self._stepped(pair, steps)
            return {
                "prefill": pair.prefill or pair.decode,
                "decode": pair.decode,
                "ok": error is None or busy,
                "busy": busy,
                "seconds": round((monotonic_ns() - began_ns) / 1e9, 4),
                "error": error.message if error is not None else None,
            }

    def _steps(self, pair: Pinned) -> dict[bytes, int]:
        links = [self._gateway.workers.link(name) for name in (pair.prefill, pair.decode)]
        return {link.incarnation: link.status.steps for link in links if link and link.status}

    def _stepped(self, pair: Pinned, before: dict[bytes, int]) -> bool:
        after = self._steps(pair)
        return any(after.get(life, 0) > steps for life, steps in before.items())


def pinned_request(
    kind: str, prompt: Sequence[int], sampling: SamplingParams, pair: Pinned, limit_s: float
) -> GenerationRequest:
    """Return a request of the router to one pair of workers, which comes before all others."""
    now_ns = monotonic_ns()
    return GenerationRequest(
        request_id=f"{kind}-{secrets.token_hex(16)}",
        prompt=tuple(prompt),
        sampling=sampling,
        priority=_FIRST,
        mode="disaggregated" if pair.prefill else "colocated",
        arrived_ns=now_ns,
        deadline_ns=now_ns + int(limit_s * 1e9),
        probe=True,
        pinned=pair,
    )


async def probed(gateway: Gateway, request: GenerationRequest) -> ActiveRequest:
    """Run a probe to its end.

    Raises:
        UnavailableError: No worker can serve it.
    """
    wakeup = asyncio.Event()
    active = gateway.submit(request, wakeup)
    while not active.record.ended:
        wakeup.clear()
        await wakeup.wait()
    return active


def usable_pairs(gateway: Gateway, round_number: int) -> list[Pinned]:
    """Return pairs of prefill and decode workers; with one pool only, each worker alone."""
    usable = gateway.workers.usable
    prefills = [slot.worker_id for slot in usable if slot.role == "prefill"]
    decodes = [slot.worker_id for slot in usable if slot.role == "decode"]
    if not (prefills and decodes):
        return [Pinned(prefill=None, decode=name) for name in prefills + decodes]
    return [
        Pinned(prefill=prefill, decode=decode)
        for prefill, decode in pairs_of(prefills, decodes, round_number)
    ]


def pairs_of(
    prefills: Sequence[str], decodes: Sequence[str], round_number: int
) -> list[tuple[str, str]]:
    """Return the pairs that a round probes: all of a few, else some that include every worker.

    After as many rounds as the smaller pool has workers, every pair has been probed.
    """
    if len(prefills) * len(decodes) <= _MANY_PAIRS:
        return [(prefill, decode) for prefill in prefills for decode in decodes]
    few, many = sorted((prefills, decodes), key=len)
    met = [(few[(index + round_number) % len(few)], name) for index, name in enumerate(many)]
    return met if few is prefills else [(prefill, decode) for decode, prefill in met]
