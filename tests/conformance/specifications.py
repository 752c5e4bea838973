"""Specifications of answers: OpenAI's document, and the types of Anthropic's SDK."""

import json
from functools import cache
from typing import Any

from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from tests.conformance.cut import OUTPUT
from tests.conformance.judge import Finding, Judge, Schema

_COMPONENTS = "#/components/schemas/"
_DEFS = "#/$defs/"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_ANTHROPIC_TYPES = {
    ("POST /v1/messages", _JSON): Message,
    ("POST /v1/messages", _EVENTS): RawMessageStreamEvent,
    ("POST /v1/messages/count_tokens", _JSON): MessageTokensCount,
    ("", _JSON): ErrorResponse,
}
_PING = {"type": "object", "properties": {"type": {"const": "ping"}}, "required": ["type"]}


def is_anthropic(call: str) -> bool:
    """Return whether a call is one of Anthropic's API."""
    return " /v1/messages" in call


def of_answer(call: str, content_type: str, value: object) -> list[Finding]:
    """Judge the body of a successful answer, or one event of its stream."""
    judge = _anthropic() if is_anthropic(call) else _openai()
    return judge.findings(value, f"{call} {content_type}")


def of_error(call: str, value: object) -> list[Finding]:
    """Judge the body of an error, or the event that ends a stream with one."""
    if is_anthropic(call):
        return _anthropic().findings(value, f" {_JSON}")
    return _openai().findings(value, "ErrorResponse")


def of_ping(value: object) -> list[Finding]:
    """Judge Anthropic's event ``ping``, for which the SDK has no type: it ignores it."""
    return _anthropic().findings(value, "ping")


@cache
def _openai() -> Judge:
    document = json.loads(OUTPUT.read_text(encoding="utf-8"))
    schemas = document["schemas"]
    for path, methods in document["paths"].items():
        for method, answer in methods.items():
            for kind, content in answer["responses"]["200"]["content"].items():
                schemas[f"{method.upper()} /v1{path} {kind}"] = content["schema"]
    # The document has no schema for this stream: its text says that both forms are the same.
    schemas[f"POST /v1/completions {_EVENTS}"] = schemas[f"POST /v1/completions {_JSON}"]
    return Judge(schemas, _COMPONENTS)


@cache
def _anthropic() -> Judge:
    schemas: dict[str, Schema] = {"ping": _PING}
    for (call, kind), annotation in _ANTHROPIC_TYPES.items():
        schema = _without_extra(TypeAdapter(annotation).json_schema())
        schemas |= schema.pop("$defs", {})
        schemas[f"{call} {kind}"] = schema
    return Judge(schemas, _DEFS)


def _without_extra(schema: Any) -> Any:
    """Remove the permission of unknown fields, which all models of the SDK have."""
    if isinstance(schema, list):
        return [_without_extra(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_extra(value) for key, value in schema.items()}
    if "properties" in plain:
        plain.pop("additionalProperties", None)
    return plain
