"""Standard ``OTEL_*`` variables of the exports of traces, logs and metrics; export of logs."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.resources import Resource

Signal = Literal["TRACES", "LOGS", "METRICS"]
_EXPORTERS: Mapping[Signal, tuple[str, str]] = {
    "TRACES": ("trace_exporter", "OTLPSpanExporter"),
    "LOGS": ("_log_exporter", "OTLPLogExporter"),
    "METRICS": ("metric_exporter", "OTLPMetricExporter"),
}
_LOG = logging.getLogger(__name__)


def is_on(signal: Signal) -> bool:
    """Return whether a signal is exported: there is an endpoint, and the exporter is not off."""
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(os.environ.get(name) for name in endpoints):
        return False
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    chosen = os.environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    return "otlp" in (name.strip() for name in chosen.split(","))


def exporter_of(signal: Signal) -> Any:
    """Return the SDK's exporter of a signal, which reads endpoint and headers itself."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, names)), "http/protobuf")
    if protocol not in ("grpc", "http/protobuf"):
        _LOG.warning(
            "OTLP protocol %r is not supported (grpc, http/protobuf): using http", protocol
        )
    transport = "grpc" if protocol == "grpc" else "http"
    module, name = _EXPORTERS[signal]
    package = f"opentelemetry.exporter.otlp.proto.{transport}"
    return getattr(importlib.import_module(f"{package}.{module}"), name)()


def resource_of(component: str) -> "Resource":
    """Return the resource of a component, called ``baton-<component>`` unless it is named."""
    # Imported here: most processes have no endpoint, and the SDK costs 100 ms and 10 MB.
    from opentelemetry.sdk.resources import Resource

    attributes = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in attributes
    return Resource.create({} if named else {"service.name": f"baton-{component}"})


class LogExport:
    """Exporter of a component's audit lines; without an OTLP endpoint it does nothing.

    ``OTEL_LOGS_EXPORTER=none`` switches it off.
    """

    def __init__(self, component: str) -> None:
        self._provider = _provider(component) if is_on("LOGS") else None

    def emit(self, line: bytes) -> None:
        """Export a line."""
        if self._provider is not None:
            from opentelemetry._logs import SeverityNumber

            self._provider.get_logger("baton.audit").emit(
                severity_number=SeverityNumber.INFO,
                body=line.decode().rstrip("\n"),
                event_name="baton.audit",
            )

    def close(self) -> None:
        """Export what is buffered, and stop."""
        if self._provider is not None:
            self._provider.force_flush(2000)
            self._provider.shutdown()


def _provider(component: str) -> "LoggerProvider":
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    provider = LoggerProvider(resource=resource_of(component))
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter_of("LOGS")))
    return provider
