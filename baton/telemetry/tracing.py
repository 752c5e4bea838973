"""Tracer of a component, and trace context on the wire.

tracing = Tracing("router")                    # OTEL_* variables; no-op without an endpoint
with tracing.tracer.start_as_current_span("prefill", context=extract(traceparent)) as span:
    submit(traceparent=inject(span))
"""

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_LOG = logging.getLogger(__name__)


class Tracing:
    """Tracer of one component.

    Without an OTLP endpoint in the environment spans cost nothing, but an incoming trace context
    still passes through ``inject``. Standard variables: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
    ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, ``OTEL_EXPORTER_OTLP_PROTOCOL`` (``grpc``, or
    ``http/protobuf``, the default), ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME``
    (default: ``baton-<component>``), ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``,
    ``OTEL_BSP_*``, ``OTEL_SDK_DISABLED``.
    """

    def __init__(self, component: str) -> None:
        self._pipeline = _pipeline(component, os.environ)
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


def _pipeline(
    component: str, environ: Mapping[str, str]
) -> "tuple[TracerProvider, SpanExporter] | None":
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(environ.get(name) for name in endpoints):
        return None
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    # Imported here: most processes have no endpoint, and the SDK costs 100 ms and 10 MB.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    attributes = {} if named else {"service.name": f"baton-{component}"}
    provider = TracerProvider(resource=Resource.create(attributes))
    exporter = _exporter(environ)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def _exporter(environ: Mapping[str, str]) -> "SpanExporter":
    # Both exporters read endpoint and headers from the environment.
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter()
    if protocol not in (None, "", "http/protobuf"):
        _LOG.warning(
            "OTLP protocol %r is not supported (grpc, http/protobuf): using http", protocol
        )
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    return over_http.OTLPSpanExporter()


def inject(span: trace.Span | None = None) -> str:
    """Return the W3C ``traceparent`` of a span (default: the current one), or ``""``."""
    if not (trace.get_current_span() if span is None else span).get_span_context().is_valid:
        return ""
    context = None if span is None else trace.set_span_in_context(span)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent", "")


def extract(traceparent: str) -> Context:
    """Return the parent context for a child span; empty for ``""`` or an invalid value."""
    if not traceparent:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
