"""Copies of answered requests, which a model runs that no client is answered by.

    client answered ──▶ room? ──▶ prepared for the shadow ──▶ run ──▶ gate, metric
                          │ no                                 │ requests need its place
                          ▼                                    ▼
                       left out                             left out

A copy starts when its client has the answer. It has the lowest priority, no tenant and no place in
the queue, so that it is in no usage, limit or latency of clients.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import BatonError, CancelledError_
from router.lanes.gate import GateBook, Outcome, outcome_of
from router.lanes.lane_table import LaneTable
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call, Prepare
from router.routing.requests.gateway import Gateway
from router.routing.requests.readiness import probed

LAST = 2**31 - 1
"""Priority after all others."""
_TENANT = "shadow traffic"  # no tenant can have this name

Result = Literal["same", "different", "answered", "failed", "refused", "left_out"]


class Shadows:
    """Runs the copies at one router."""

    def __init__(
        self, gates: GateBook, lanes: LaneTable, metrics: Metrics, tasks: BackgroundTasks
    ) -> None:
        self._gates = gates
        self._lanes = lanes
        self._metrics = metrics
        self._tasks = tasks

    def answered(self, call: Call) -> None:
        """Let the shadow of a name, if it has one, run a copy of a call beside its client."""
        routed = call.requests[0].routed
        if routed is None or call.copied is None or not self._lanes.serves(call.shadow):
            return
        gateway = self._lanes.of(call.shadow).gateway
        shadow = _Shadow(routed.requested, call.shadow, gateway)
        if not gateway.has_spare_place:
            self._count(shadow, "left_out")
            return
        client = [_Answer.of(active) for active in call.active]
        self._tasks.spawn(self._run(shadow, client, call.copied), "shadow")

    async def _run(self, shadow: "_Shadow", client: "list[_Answer]", prepare: Prepare) -> None:
        try:
            requests = await prepare()
            copies = (probed(shadow.gateway, as_copy(request)) for request in requests)
            ended = await asyncio.gather(*copies)
        except BatonError as error:  # it does not fit the model, or no worker is ready
            self._count(shadow, "refused" if error.status < 500 else "left_out")
            return
        errors = [active.record.error for active in ended if active.record.error is not None]
        if any(isinstance(error, CancelledError_) for error in errors):
            self._count(shadow, "left_out")
        elif any(error.status < 500 for error in errors):
            self._count(shadow, "refused")
        elif errors:
            self._judge(shadow, Outcome(failed=True), client, None)
            self._count(shadow, "failed")
        else:
            same = _compared(client, [_Answer.of(active) for active in ended])
            self._judge(shadow, outcome_of(ended[0]), client, same)
            result: Result = "answered" if same is None else "same" if same else "different"
            self._count(shadow, result)

    def _judge(
        self, shadow: "_Shadow", copy: Outcome, client: "list[_Answer]", same: bool | None
    ) -> None:
        gate = self._gates.get(shadow.name)
        if gate is not None and gate.entry.candidate == shadow.model:
            gate.compared(copy, client[0].outcome, same=same)

    def _count(self, shadow: "_Shadow", result: Result) -> None:
        self._metrics.inc("baton_shadow_requests", model=shadow.model, result=result)


def as_copy(request: GenerationRequest) -> GenerationRequest:
    """Return the copy of a request that a shadow runs."""
    return replace(
        request,
        priority=LAST,
        tenant=_TENANT,
        slo=None,
        key_id="",
        traceparent="",
        tracestate="",
        baggage="",
        probe=True,
        shadow=True,
    )


@dataclass(frozen=True, slots=True)
class _Shadow:
    """Model that runs copies of the requests for a name."""

    name: str
    model: str
    gateway: Gateway


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer to one request: its prompt, whether it is greedy, and the tokens of all choices."""

    prompt: Sequence[int]
    greedy: bool
    tokens: list[list[int]]
    outcome: Outcome

    @classmethod
    def of(cls, active: ActiveRequest) -> "_Answer":
        return cls(
            prompt=active.request.prompt,
            greedy=active.request.sampling.temperature == 0,
            tokens=[choice.token_ids for choice in active.record.choices],
            outcome=outcome_of(active),
        )


def _compared(client: list[_Answer], copy: list[_Answer]) -> bool | None:
    """Return whether all answers have the same tokens; None if they need not."""
    pairs = list(zip(client, copy, strict=True))
    if not all(own.greedy and own.prompt == other.prompt for own, other in pairs):
        return None
    return all(own.tokens == other.tokens for own, other in pairs)
