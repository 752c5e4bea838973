"""Audit lines reach a collector as OpenTelemetry logs."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from baton.telemetry.otlp import LogExport

LINE = b'{"seq":1,"verb":"scale"}\n'


class Collector(BaseHTTPRequestHandler):
    received: ClassVar[list[tuple[str, ExportLogsServiceRequest]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        message = ExportLogsServiceRequest()
        message.ParseFromString(body)
        self.received.append((self.path, message))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Collector.received.clear()
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_line_is_a_log_record_of_the_component(endpoint, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    export = LogExport("router")
    export.emit(LINE)
    export.close()
    ((path, message),) = Collector.received
    assert path == "/v1/logs"
    (resource,) = message.resource_logs
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "baton-router"
    (record,) = resource.scope_logs[0].log_records
    assert record.body.string_value.encode() == LINE.rstrip()
    assert record.event_name == "baton.audit"


@pytest.mark.parametrize(
    "more", [{"OTEL_LOGS_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}, {}]
)
def test_nothing_is_exported_unless_asked_for(endpoint, monkeypatch, more):
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **more} if more else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    export = LogExport("router")
    export.emit(LINE)
    export.close()
    assert Collector.received == []
