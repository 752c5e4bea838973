"""One span for each call, with GenAI attributes, and the workers' spans below it."""

import json
from base64 import b64decode

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes
from opentelemetry.trace import SpanKind
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)

from loadtest.workloads.agent_traces import agent_calls
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0)})


def recorded(fleet) -> InMemorySpanExporter:
    """Everything that a router traces from now on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fleet.router.tracing.tracer = provider.get_tracer("test")
    return exporter


@pytest.fixture
def spans(fleet):
    exporter = recorded(fleet)
    # The parts of a call are spans of their own, and end before it.
    yield lambda: [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]


async def test_a_call_is_one_span_between_client_and_worker(fleet, spans):
    asked = {"top_p": 0.5, "frequency_penalty": 0.25, "response_format": {"type": "text"}}
    response = await fleet.chat("a secret", user="u", headers={"traceparent": CLIENT}, **asked)
    await until(lambda: len(spans()) == 1)
    [span] = spans()
    assert span.name == f"chat {MODEL}"
    assert span.parent.span_id == 0xB7AD6B7169203331
    sent = fleet.workers["decode-0"].submissions[0].traceparent
    assert sent.split("-")[1] == CLIENT.split("-")[1]
    assert int(sent.split("-")[2], 16) == span.context.span_id
    attributes = dict(span.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.top_p"] == 0.5
    assert attributes["gen_ai.request.frequency_penalty"] == 0.25
    assert attributes["gen_ai.output.type"] == "text"
    assert "gen_ai.request.choice.count" not in attributes, "only if it is not 1"
    assert attributes["gen_ai.response.id"] == response.json()["id"]
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["enduser.id"] == "u"
    assert "secret" not in repr(attributes)


@pytest.mark.parametrize(
    ("path", "body", "refused"),
    [
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4},
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        ),
        (
            "/v1/responses",
            {"input": "a secret", "max_output_tokens": 4},
            {"tool_choice": "required"},
        ),
    ],
)
async def test_calls_of_the_newer_apis_are_spans_of_the_same_kind(
    fleet, spans, path, body, refused
):
    for stream in (False, True):
        await fleet.http.post(path, json={"model": MODEL, "stream": stream} | body)
    await fleet.http.post(path, json={"model": MODEL} | body | refused)
    await until(lambda: len(spans()) == 3)
    whole, streamed, bad = (dict(span.attributes) for span in spans())
    for attributes in (whole, streamed):
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.request.max_tokens"] == 4
        assert attributes["gen_ai.usage.output_tokens"] == 4
        assert attributes["gen_ai.response.id"].startswith(("msg_", "resp_"))
        assert attributes["http.response.status_code"] == 200
        assert "secret" not in repr(attributes)
    assert (whole["gen_ai.request.stream"], streamed["gen_ai.request.stream"]) == (False, True)
    assert bad["error.type"] == "invalid_request"


async def test_the_clients_own_ids_are_attributes(fleet, spans):
    await fleet.chat(headers={"x-request-id": "order-66", "x-session-id": "s-1"})
    await until(lambda: len(spans()) == 1)
    assert spans()[0].attributes["baton.client_request_id"] == "order-66"
    assert spans()[0].attributes["gen_ai.conversation.id"] == "s-1"


async def test_what_is_refused_ends_its_span_with_the_reason(fleet, spans):
    await fleet.complete("hi", max_tokens=9000)
    [span] = spans()
    assert span.name == f"text_completion {MODEL}"
    assert span.attributes["error.type"] == "context_length_exceeded"


STATE = {"traceparent": CLIENT, "tracestate": "vendor=x,ot=th:8", "baggage": "order=66;p,a=%20b"}


async def test_without_a_trace_the_clients_context_passes_through(fleet, monkeypatch):
    """It is not parsed, which takes 20 µs."""
    monkeypatch.delattr("router.frontend.api.tracing.extract")
    await fleet.chat(headers=STATE)
    [sent] = fleet.workers["decode-0"].submissions
    assert {name: getattr(sent, name) for name in STATE} == STATE


async def test_a_spans_tracestate_and_the_baggage_travel_with_it(fleet, spans):
    await fleet.chat(headers=STATE)
    await until(lambda: len(spans()) == 1)
    [sent] = fleet.workers["decode-0"].submissions
    assert spans()[0].context.trace_state.to_header() == sent.tracestate == STATE["tracestate"]
    assert sent.baggage == STATE["baggage"]


async def test_hostile_context_is_left_out(fleet):
    """Its values go into messages: they are short and printable, or nothing."""
    for value in ("x" * 8193, "é=1".encode("latin-1")):
        await fleet.chat(headers={"traceparent": CLIENT, "baggage": value, "tracestate": value})
    await fleet.chat(headers={"traceparent": f"{CLIENT}-{'x' * 512}", "tracestate": "a=1"})
    await fleet.chat(headers={"tracestate": "a=1"})  # of no trace
    for sent in fleet.workers["decode-0"].submissions:
        assert (sent.baggage, sent.tracestate) == ("", "")


async def test_spans_use_names_of_the_semantic_conventions(fleet, spans):
    await fleet.chat()
    await until(lambda: len(spans()) == 1)
    conventions = {
        value
        for module in (gen_ai_attributes, server_attributes, error_attributes, http_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    attributes = dict(spans()[0].attributes)
    used = {name for name in attributes if name.startswith(("gen_ai.", "server.", "http."))}
    assert used - conventions == set()
    assert attributes[server_attributes.SERVER_ADDRESS] == "127.0.0.1"
    assert isinstance(attributes[server_attributes.SERVER_PORT], int)
    assert attributes[gen_ai_attributes.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS] == 0


async def test_calls_are_metrics_of_the_conventions_with_the_trace_as_exemplar(fleet):
    await fleet.chat(headers={"traceparent": CLIENT})
    await fleet.complete(max_tokens=9000)
    accept = {"accept": "application/openmetrics-text"}
    ended = fleet.router.metrics.exemplars
    await until(lambda: any(series[0].startswith("baton_e2e_seconds") for series in ended()))
    page = await fleet.http.get("/metrics", headers=accept)
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in openmetrics_families(page.text)}
    duration = families["gen_ai_server_request_duration_seconds"].samples
    [chat, refused] = [s.labels for s in duration if s.name.endswith("_count")]
    assert chat["gen_ai_operation_name"] == "chat"
    assert chat["gen_ai_request_model"] == chat["gen_ai_response_model"] == MODEL
    assert (chat["error_type"], chat["server_address"]) == ("", "127.0.0.1")
    assert refused["gen_ai_operation_name"] == "text_completion"
    assert refused["error_type"] == "context_length_exceeded"
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        samples = families[f"gen_ai_server_{name}_seconds"].samples
        traced = [s.exemplar.labels for s in samples if s.exemplar is not None]
        assert traced == [{"trace_id": CLIENT.split("-")[1]}], name
    traced = [s for s in families["baton_e2e_seconds"].samples if s.exemplar is not None]
    assert len(traced) == 1


@pytest.mark.parametrize(
    "place",
    [
        "router.frontend.api.prepare.Preparer.chat",
        "router.frontend.api.formats.openai.ChatFormat.whole",
    ],
)
async def test_a_fault_of_ours_is_a_span_and_a_500_in_the_metrics(fleet, spans, monkeypatch, place):
    monkeypatch.setattr(place, lambda *_: 1 / 0)
    answer = await fleet.chat()
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    await until(lambda: len(spans()) == 1)
    page = (await fleet.http.get("/metrics")).text
    [line] = [line for line in page.splitlines() if line.startswith("baton_requests_total{")]
    assert 'endpoint="chat",status="500"' in line
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_the_parts_of_a_call_lie_in_its_time_and_a_retry_links_to_what_it_replaces(
    make_fleet,
):
    failing = Script(fail=("unavailable", "not now", True))
    fleet = await make_fleet({"decode-0": failing, "decode-1": failing})
    exporter = recorded(fleet)
    assert (await fleet.chat()).status_code == 503
    fleet.workers["decode-0"].script = fleet.workers["decode-1"].script = Script()
    assert (await fleet.chat()).status_code == 200

    def calls() -> list[ReadableSpan]:
        return [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]

    await until(lambda: len(calls()) == 2)
    refused, answered = calls()

    def parts(call: ReadableSpan) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in exporter.get_finished_spans():
            if span.parent is not None and span.parent.span_id == call.context.span_id:
                assert call.start_time - 50_000_000 <= span.start_time <= span.end_time
                assert span.end_time <= call.end_time + 50_000_000
                found.setdefault(span.name, []).append(span)
        return found

    first, second = parts(refused)["baton.attempt"]
    assert list(first.links) == []
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert second.attributes["baton.attempt"] == 2
    assert first.attributes["baton.placement"] != second.attributes["baton.placement"]
    assert set(parts(answered)) == {"baton.queue", "baton.attempt", "baton.delivery"}
    assert first.end_time == second.start_time


async def test_a_fleets_spans_are_a_load(fleet, spans, tmp_path):
    """As a collector writes them: ids are hexadecimal, 64-bit numbers are strings."""
    for number in (1, 2):
        await fleet.chat("hello " * 40 * number, headers={"x-session-id": "s-1"})
        await until(lambda number=number: len(spans()) == number)
    lines = MessageToDict(encode_spans(spans()))
    for span in lines["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId"):
            span[name] = b64decode(span[name]).hex()
        span["kind"] = SpanKind.SERVER.value + 1
    (tmp_path / "spans.jsonl").write_text(json.dumps(lines) + "\n")
    first, second = agent_calls(tmp_path / "spans.jsonl")
    assert [first.session, second.session] == ["s-1", "s-1"]
    assert second.after == (0,)
    usage = [dict(span.attributes)["gen_ai.usage.input_tokens"] for span in spans()]
    assert [first.input_tokens, second.input_tokens] == usage
    assert second.blocks[: len(first.blocks)] == first.blocks
