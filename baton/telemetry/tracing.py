"""Tracer of a component, and trace context on the wire.

tracing = Tracing("router")                    # OTEL_* variables; no-op without an endpoint
with tracing.tracer.start_as_current_span("prefill", context=extract(traceparent)) as span:
    submit(traceparent=inject(span))
"""

import re
import threading
from socket import gethostname
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.semconv.attributes.server_attributes import SERVER_ADDRESS, SERVER_PORT
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.telemetry.otlp import exporter_of, is_on, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_PASSED = 8192  # characters of `baggage`: W3C's limit
MAX_PARENT = 512  # characters of `traceparent`: beyond it OpenTelemetry logs a warning
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - these are no address of a server
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})")


class Tracing:
    """Tracer of one component; ``server`` has the attributes of the address that it listens on.

    Without an OTLP endpoint in the environment spans cost nothing, but an incoming trace context
    still passes through ``inject``. Standard variables: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, ``OTEL_EXPORTER_OTLP_PROTOCOL`` (``grpc``, or
    ``http/protobuf``, the default), ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME``
    (default: ``baton-<component>``), ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``,
    ``OTEL_BSP_*``, ``OTEL_SDK_DISABLED``.
    """

    def __init__(self, component: str, host: str = "", port: int = 0) -> None:
        address = gethostname() if host in _ANY_ADDRESS else host
        self.server: dict[str, str | int] = {SERVER_ADDRESS: address, SERVER_PORT: port}
        self._pipeline = _pipeline(component) if is_on("TRACES") else None
        self.tracer: trace.Tracer = (
            self._pipeline[0].get_tracer(f"baton.{component}")
            if self._pipeline
            else trace.NoOpTracer()
        )

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Export the buffered spans and stop; blocks for at most about ``timeout_s``."""
        if self._pipeline is None:
            return
        provider, exporter = self._pipeline
        # The exporter retries for 10 s without a collector; its shutdown ends the waiting.
        alarm = threading.Timer(timeout_s, exporter.shutdown)
        alarm.start()
        provider.shutdown()
        alarm.cancel()


def _pipeline(component: str) -> "tuple[TracerProvider, SpanExporter]":
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource_of(component))
    exporter = exporter_of("TRACES")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def passed_on(value: str, limit: int = MAX_PASSED) -> str:
    """Return a field of a client's trace context, or ``""`` if it is too long or no ASCII."""
    return value if len(value) <= limit and value.isascii() and value.isprintable() else ""


def tracestate_of(span: trace.Span) -> str:
    """Return the W3C ``tracestate`` of a span."""
    return span.get_span_context().trace_state.to_header()


def inject(span: trace.Span | None = None) -> str:
    """Return the W3C ``traceparent`` of a span (default: the current one), or ``""``."""
    if not (trace.get_current_span() if span is None else span).get_span_context().is_valid:
        return ""
    context = None if span is None else trace.set_span_in_context(span)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent", "")


def extract(traceparent: str, tracestate: str = "") -> Context:
    """Return the parent context for a child span; empty for ``""`` or an invalid value."""
    if not traceparent:
        return Context()
    carrier = {"traceparent": traceparent}
    if tracestate:
        carrier["tracestate"] = tracestate
    return TraceContextTextMapPropagator().extract(carrier, Context())


def sampled_trace_id(traceparent: str) -> str:
    """Return the trace id if its spans are recorded, for exemplars, or ``""``."""
    form = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return form[1] if form is not None and int(form[2], 16) & 1 else ""
