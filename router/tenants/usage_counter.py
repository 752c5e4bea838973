"""Usage of the calls of one router, by tenant, API key and model."""

import time
from collections.abc import Mapping
from typing import Any

from batonpb.decode_pb2 import RequestTimes

from baton.tenants.usage.ledger import HOUR_S, Counters, Ledger, RowName
from router.request import GenerationRequest


class UsageCounter:
    """Adds calls to the rows of the current hour.

    Args:
        ledger: Usage of this router.
        model: Name of the base model.
    """

    def __init__(self, ledger: Ledger, model: str) -> None:
        self.ledger = ledger
        self._model = model

    def answered(self, request: GenerationRequest, usage: Mapping[str, Any]) -> None:
        """Count a call by the ``usage`` of its answer, in OpenAI's form."""
        row = self._row(request)
        row.requests += 1
        row.input_tokens += usage["prompt_tokens"]
        row.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        row.output_tokens += usage["completion_tokens"]
        row.reasoning_tokens += usage["completion_tokens_details"]["reasoning_tokens"]

    def failed(self, request: GenerationRequest, code: str) -> None:
        """Count a call that ended with an error in place of an answer."""
        _add_refusal(self._row(request), code)

    def refused(self, tenant: str, key_id: str, code: str) -> None:
        """Count a call that was refused before its model was known."""
        _add_refusal(self.ledger.row(RowName(_hour(), tenant, key_id, "")), code)

    def charge(self, request: GenerationRequest, times: RequestTimes) -> None:
        """Add the time that a worker computed for a request."""
        row = self._row(request)
        row.input_ns += times.input_ns
        row.output_ns += times.output_ns

    def _row(self, request: GenerationRequest) -> Counters:
        model = self._model if request.adapter is None else request.adapter.name
        return self.ledger.row(RowName(_hour(), request.tenant, request.key_id, model))


def _add_refusal(row: Counters, code: str) -> None:
    row.refusals[code] = row.refusals.get(code, 0) + 1


def _hour() -> int:
    return int(time.time()) // HOUR_S
