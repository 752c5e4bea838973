"""Spans of generation calls and of their parts, with OpenTelemetry's GenAI attributes.

chat MODEL                          the call, at the router
├── baton.queue                     time in the router's queue
├── baton.attempt                   one placement; links to the previous attempt
├── baton.delivery                  from the last token to the last byte sent
└── baton.decode                    each attempt at the decode worker
    ├── baton.transfer              from the request of the first chunk to the commit
    └── baton.prefill               work of the prefill worker
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context

from baton.telemetry.tracing import Tracing, extract, inject, tracestate_of
from baton.types.errors import BatonError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.caller import Caller
from router.frontend.api.formats.answer_format import usage
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call
from router.sessions.identity import session_of

PLACED = "placed on "
"""Prefix of the timeline event that starts an attempt."""


def gateway_span(tracing: Tracing, operation: str, body: GenerationBody, caller: Caller) -> Span:
    """Start the span of a ``chat`` or ``text_completion``; it never contains text."""
    limit = body.max_completion_tokens if isinstance(body, ChatBody) else None
    output = {"json_object": "json", "json_schema": "json", "text": "text"}.get(
        body.response_format.type if body.response_format is not None else ""
    )
    session = session_of(caller.session, body.prompt_cache_key, body.user)
    attributes = {
        "gen_ai.conversation.id": session.id or None,
        "gen_ai.request.max_tokens": limit or body.max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stream": bool(body.stream),
        "gen_ai.request.frequency_penalty": body.frequency_penalty,
        "gen_ai.request.presence_penalty": body.presence_penalty,
        "gen_ai.request.choice.count": body.n if body.n != 1 else None,
        "gen_ai.output.type": output,
        "gen_ai.request.stop_sequences": list(body.stops) or None,
    }
    return _started(tracing, operation, body, caller, attributes)


def embedding_span(tracing: Tracing, body: EmbeddingBody, caller: Caller) -> Span:
    """Start the span of an embeddings call."""
    attributes = {
        "gen_ai.request.encoding_formats": [body.encoding_format],
        "gen_ai.embeddings.dimension.count": body.dimensions,
    }
    return _started(tracing, "embeddings", body, caller, attributes)


def _started(
    tracing: Tracing,
    operation: str,
    body: GenerationBody | EmbeddingBody,
    caller: Caller,
    attributes: dict[str, Any],
) -> Span:
    if isinstance(tracing.tracer, trace.NoOpTracer):  # the caller's context is passed on as it is
        return trace.INVALID_SPAN
    name = f"{operation} {body.model}"
    context = extract(caller.traceparent, caller.tracestate)
    span = tracing.tracer.start_span(name, context=context, kind=SpanKind.SERVER)
    if not span.is_recording():
        return span
    common = {
        **tracing.server,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": body.model,
        "enduser.id": body.user,
        "baton.tenant": caller.tenant,
        "baton.client_request_id": caller.client_id or None,
        "baton.mode": caller.mode,
        **_version(caller),
    }
    _set(span, {**common, **attributes})
    return span


def _version(caller: Caller) -> dict[str, Any]:
    """Return the attributes of the model that answers, and why it does."""
    routed = caller.routed
    if routed is None:
        return {}
    return {
        "gen_ai.response.model": routed.model,
        "baton.model.requested": routed.requested,
        "baton.model.version": routed.version,
        "baton.model.why": routed.why,
        "baton.model.rollback_to": routed.rollback_to or None,
    }


def _set(span: Span, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)


def traceparent_of(span: Span, caller: Caller) -> Caller:
    """Return the caller with ``span`` as the parent of the workers' spans."""
    traceparent = inject(span)
    if not traceparent:
        return caller
    return replace(caller, traceparent=traceparent, tracestate=tracestate_of(span))


@contextmanager
def ended_on_error(span: Span) -> Iterator[None]:
    """End the span if the request is rejected; otherwise the answer ends it."""
    try:
        yield
    except BaseException as error:
        code = type(error).__name__
        status = 500 if isinstance(error, Exception) else 499  # cancelled: the client left
        if isinstance(error, BatonError):
            code = error.code
            status = error.status
        span.set_attribute("error.type", code)
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, code))
        span.end()
        raise


def end_span(tracing: Tracing, span: Span, call: Call) -> None:
    """End the span of a call, and write the spans of its parts."""
    if span.is_recording():
        _describe(span, call)
        for active in call.active:
            if active.record.first_token_ns:
                waited_ns = active.record.first_token_ns - active.request.arrived_ns
                span.set_attribute("gen_ai.response.time_to_first_chunk", waited_ns / 1e9)
                span.set_attribute("baton.route", active.route_header())
            _part_spans(tracing, span, active)
    span.end()


def _describe(span: Span, call: Call) -> None:
    counted = usage(call.active)
    reasons = [
        choice.finish_reason or "error"
        for active in call.active
        for choice in active.record.choices
    ]
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    reasoning = counted["completion_tokens_details"]["reasoning_tokens"]
    span.set_attribute("gen_ai.response.id", call.id)
    span.set_attribute("gen_ai.response.finish_reasons", reasons)
    span.set_attribute("gen_ai.usage.input_tokens", counted["prompt_tokens"])
    span.set_attribute("gen_ai.usage.output_tokens", counted["completion_tokens"])
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
    span.set_attribute("gen_ai.usage.reasoning.output_tokens", reasoning)
    span.set_attribute("http.response.status_code", call.status)
    code = next((error.code for error in (call.error, *call.errors) if error is not None), "")
    if code:
        span.set_attribute("error.type", code)
    if call.status >= 500 or (call.status == 200 and call.errors):
        span.set_status(Status(StatusCode.ERROR, code))


def _part_spans(tracing: Tracing, span: Span, active: ActiveRequest) -> None:
    """Write the spans of a request's parts at the router, when the request has ended."""
    record = active.record
    context = set_span_in_context(span)
    to_unix_ns = time_ns() - monotonic_ns()

    def write(name: str, begin_ns: int, end_ns: int, **more: Any) -> Span:
        part = tracing.tracer.start_span(
            name, context=context, start_time=begin_ns + to_unix_ns, links=more.pop("links", ())
        )
        _set(part, {"baton.request_id": active.id, **more})
        part.end(max(end_ns, begin_ns) + to_unix_ns)
        return part

    placed = [(at_ns, event) for event, at_ns in record.timeline if event.startswith(PLACED)]
    end_ns = record.last_token_ns or active.delivered_ns or monotonic_ns()
    if active.submitted_ns:
        write("baton.queue", active.submitted_ns, placed[0][0] if placed else end_ns)
    before: Span | None = None
    for number, (begin_ns, event) in enumerate(placed, start=1):
        until_ns = placed[number][0] if number < len(placed) else end_ns
        links = [Link(before.get_span_context())] if before is not None else []
        where = {"baton.placement": event.removeprefix(PLACED)}
        attempt = {"baton.attempt": number, **where}
        before = write("baton.attempt", begin_ns, until_ns, links=links, **attempt)
    if record.last_token_ns and active.delivered_ns:
        write("baton.delivery", record.last_token_ns, active.delivered_ns)
