"""Spans reach a collector by both of OTLP's ways, as the standard variables say."""

import logging

import pytest
from opentelemetry.trace import NoOpTracer

from baton.telemetry.tracing import Tracing
from tests.telemetry.otlp_collector import over_grpc, over_http


@pytest.mark.parametrize(
    ("listening", "variables"),
    [
        (over_http, {}),
        (over_http, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}),
        (over_grpc, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
        (
            over_grpc,
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",  # the narrower one counts
            },
        ),
    ],
)
def test_a_span_arrives(listening, variables, monkeypatch):
    with listening() as (collector, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ops")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        tracing = Tracing("router")
        tracing.tracer.start_span("hop").end()
        tracing.shutdown()
    [[(service, span)]] = collector.traces.values()
    assert (service, span.name) == ("baton-router", "hop")
    assert collector.headers[0]["x-tenant"] == "ops"


def test_a_protocol_that_is_unknown_is_said_to_be(monkeypatch, caplog):
    with over_http() as (collector, endpoint), caplog.at_level(logging.WARNING):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        tracing = Tracing("router")
        tracing.tracer.start_span("hop").end()
        tracing.shutdown()
    assert "'http/json'" in caplog.text
    assert len(collector.traces) == 1


def test_without_an_endpoint_nothing_is_traced(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert isinstance(Tracing("router").tracer, NoOpTracer)
