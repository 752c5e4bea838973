"""One span for each generation call, with OpenTelemetry's GenAI attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from opentelemetry.trace import Span, SpanKind

from engine.core.errors import BatonError
from router.api.prepare import Caller
from router.api.schema import ChatBody, EmbeddingBody, GenerationBody
from telemetry.tracing import Tracing, extract, inject


def gateway_span(tracing: Tracing, operation: str, body: GenerationBody, caller: Caller) -> Span:
    """Start the span of a call; it holds parameters, never text.

    Args:
        tracing: Of the router.
        operation: ``chat`` or ``text_completion``.
        body: What was asked.
        caller: Brings the client's trace context.
    """
    span = tracing.tracer.start_span(
        f"{operation} {body.model}",
        context=extract(caller.traceparent),
        kind=SpanKind.SERVER,
    )
    limit = body.max_completion_tokens if isinstance(body, ChatBody) else None
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": body.model,
        "gen_ai.request.max_tokens": limit or body.max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stream": bool(body.stream),
        "gen_ai.request.choice.count": body.n or 1,
        "gen_ai.request.stop_sequences": list(body.stops) or None,
        "enduser.id": body.user,
        "baton.tenant": caller.tenant,
        "baton.mode": caller.mode,
    }
    _set(span, attributes)
    return span


def embedding_span(tracing: Tracing, body: EmbeddingBody, caller: Caller) -> Span:
    """Start the span of an embeddings call."""
    span = tracing.tracer.start_span(
        f"embeddings {body.model}",
        context=extract(caller.traceparent),
        kind=SpanKind.SERVER,
    )
    attributes = {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": body.model,
        "gen_ai.request.encoding_formats": [body.encoding_format],
        "gen_ai.embeddings.dimension.count": body.dimensions,
        "enduser.id": body.user,
        "baton.tenant": caller.tenant,
        "baton.mode": caller.mode,
    }
    _set(span, attributes)
    return span


def _set(span: Span, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value)


def traceparent_of(span: Span, caller: Caller) -> Caller:
    """The caller with our span as the parent of what the workers do."""
    return replace(caller, traceparent=inject(span) or caller.traceparent)


@contextmanager
def ended_on_error(span: Span) -> Iterator[None]:
    """A request that is refused ends its span here; otherwise the answer does."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, BatonError) else type(error).__name__
        span.set_attribute("error.type", code)
        span.end()
        raise
