"""Metrics of calls by OpenTelemetry's conventions for generative AI.

`gen_ai.server.request.duration`, `.time_to_first_token` and `.time_per_output_token`, with the
attributes and buckets of https://github.com/open-telemetry/semantic-conventions-genai.
"""

import time
from collections.abc import Mapping
from functools import lru_cache

from baton.telemetry.histograms import Histogram
from baton.telemetry.metrics import MAX_LABEL_SETS, Metrics
from baton.telemetry.tracing import sampled_trace_id
from router.routing.requests.call import Call

_OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}


class GenAiMetrics:
    """Observes calls of one router; ``server`` has the attributes of its address."""

    def __init__(self, metrics: Metrics, server: Mapping[str, str | int]) -> None:
        self._metrics = metrics
        self._common = {
            "gen_ai_provider_name": "baton",
            **{name.replace(".", "_"): str(value) for name, value in server.items()},
        }
        self._histograms = lru_cache(MAX_LABEL_SETS)(self._made)

    def ended(self, call: Call) -> None:
        """Observe a call that ended."""
        operation = _OPERATIONS.get(call.endpoint)
        if operation is None:
            return
        request = call.requests[0] if call.requests else None
        routed = request.routed if request is not None else None
        models = (routed.requested, routed.model) if routed is not None else (call.model, "")
        error = call.error or next(iter(call.errors), None)
        code = error.code if error is not None else ""
        duration, first_token, per_token = self._histograms(operation, *models, code)
        trace_id = sampled_trace_id(request.traceparent) if request is not None else ""
        took_s = (time.monotonic_ns() - call.arrived_ns) / 1e9
        duration.observe(took_s, trace_id=trace_id)
        if error is not None or call.status != 200:
            return
        for active in call.active:
            record = active.record
            if not record.first_token_ns or active.request.pooling:
                continue
            waited_s = (record.first_token_ns - active.request.arrived_ns) / 1e9
            first_token.observe(waited_s, trace_id=trace_id)
            tokens = record.completion_tokens / active.request.sampling.n
            if tokens > 1:
                decode_s = (record.last_token_ns - record.first_token_ns) / 1e9
                per_token.observe(decode_s / (tokens - 1), trace_id=trace_id)

    def _made(
        self, operation: str, requested: str, used: str, error: str
    ) -> tuple[Histogram, Histogram, Histogram]:
        of = {
            **self._common,
            "gen_ai_operation_name": operation,
            "gen_ai_request_model": requested,
            "gen_ai_response_model": used,
        }
        histogram = self._metrics.histogram
        return (
            histogram("gen_ai_server_request_duration_seconds", error_type=error, **of),
            histogram("gen_ai_server_time_to_first_token_seconds", **of),
            histogram("gen_ai_server_time_per_output_token_seconds", **of),
        )
