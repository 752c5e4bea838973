"""Export of audit lines as OpenTelemetry logs, by the standard ``OTEL_*`` variables."""

from typing import TYPE_CHECKING

from baton.telemetry.otlp import exporter_of, is_on, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider


class LogExport:
    """Exporter of one component; without an OTLP endpoint in the environment it does nothing.

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
