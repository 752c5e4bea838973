"""A collector of traces, and a listener for other signals: OTLP over gRPC and over HTTP."""

import gzip
import http.server
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(service.TraceServiceServicer):
    """What has come so far."""

    def __init__(self) -> None:
        self.traces: dict[bytes, list[tuple[str, Span]]] = defaultdict(list)  # with the service
        self.headers: list[dict[str, str]] = []

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        for resource in request.resource_spans:
            told = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.traces[span.trace_id].append((told.get("service.name", ""), span))

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.take(request, {key: str(value) for key, value in context.invocation_metadata()})
        return ExportTraceServiceResponse()


@contextmanager
def over_grpc() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def over_http() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its endpoint."""
    collector = Collector()

    def take(body: bytes, headers: dict[str, str]) -> None:
        collector.take(ExportTraceServiceRequest.FromString(body), headers)

    with listening("/v1/traces", take) as url:
        yield collector, url


@contextmanager
def listening(path: str, take: Callable[[bytes, dict[str, str]], None]) -> Iterator[str]:
    """A server that passes the bodies and headers of one path on, and its endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == path:
                take(body, {key.lower(): value for key, value in self.headers.items()})
            self.send_response(200 if self.path == path else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
