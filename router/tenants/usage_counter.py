"""Usage of the calls of one router, by tenant, API key and model."""

import time
from collections.abc import Callable

from batonpb.decode_pb2 import RequestTimes

from baton.tenants.usage.ledger import HOUR_S, Counters, Ledger, RowName
from router.request import GenerationRequest
from router.tenants.metered_call import MeteredCall


class UsageCounter:
    """Adds calls to the rows of the current hour in the ``ledger`` of a router."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def ended(self, call: MeteredCall) -> None:
        """Count a call by what the answer's ``usage`` contains, or its error.

        A client that has left pays for what workers had received and generated until then.
        """
        if not call.tenant:
            return
        placed = call.placed
        if call.error is not None:
            refusals = self._row_of(call).refusals
            refusals[call.error.code] = refusals.get(call.error.code, 0) + 1
        elif placed or call.status == 200:
            row = self._row_of(call)
            row.requests += 1
            row.input_tokens += sum(record.prompt_tokens for record in placed)
            row.cached_tokens += sum(record.cached_tokens for record in placed)
            row.output_tokens += sum(record.completion_tokens for record in placed)
            row.reasoning_tokens += sum(record.reasoning_tokens for record in placed)

    def of(self, model: str) -> Callable[[GenerationRequest, RequestTimes], None]:
        """Return a function that adds the time that a worker of ``model`` has computed."""

        def charge(request: GenerationRequest, times: RequestTimes) -> None:
            row = self._row(request, model)
            row.input_ns += times.input_ns
            row.output_ns += times.output_ns

        return charge

    def _row_of(self, call: MeteredCall) -> Counters:
        if call.requests:
            return self._row(call.requests[0], call.model)
        return self.ledger.row(RowName(_hour(), call.tenant, call.key_id, ""))

    def _row(self, request: GenerationRequest, model: str) -> Counters:
        name = model if request.adapter is None else request.adapter.name
        return self.ledger.row(RowName(_hour(), request.tenant, request.key_id, name))


def _hour() -> int:
    return int(time.time()) // HOUR_S
