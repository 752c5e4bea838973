"""Completes what FastAPI generates: bodies, answers, examples, keys."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from router.frontend.openapi.answers import Error
from router.frontend.openapi.calls import CALLS, Call

_REF = "#/components/schemas/{model}"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `api_keys`."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe(
    app: FastAPI, bodies: Iterable[type[BaseModel]], model_name: str, *, has_keys: bool
) -> None:
    """Make ``/openapi.json`` say all that there is to say.

    The document is made when it is first asked for, and kept: that takes a tenth of a second, and
    whoever reaches the router may ask.

    Args:
        app: Whose description it is.
        bodies: Of requests, which endpoints parse themselves.
        model_name: Stands in the examples.
        has_keys: Whether the fleet has API keys; without, a key may be sent and is not looked at.
    """
    generate = app.openapi
    kinds: list[type[BaseModel]] = [*bodies, Error]

    @cache
    def openapi() -> dict[str, Any]:
        document = generate()
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        components["securitySchemes"] = _KEYS
        document["security"] = [{name: []} for name in _KEYS] + ([] if has_keys else [{}])
        for kind in kinds:
            _add(schemas, kind)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(operation, CALLS.get((method, path)), schemas, model_name)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _add(schemas: dict[str, Any], kind: type[BaseModel]) -> dict[str, str]:
    """Add a schema and those that it names; returns the reference to it."""
    schema = kind.model_json_schema(ref_template=_REF)
    schemas.update(schema.pop("$defs", {}))
    schemas[kind.__name__] = schema
    return {"$ref": _REF.format(model=kind.__name__)}


def _complete(
    operation: dict[str, Any], call: Call | None, schemas: dict[str, Any], model_name: str
) -> None:
    kind = Error if call is None else call.error
    error = {"description": "What went wrong", "content": _content(_add(schemas, kind))}
    operation["responses"].setdefault("default", error)
    if call is None:
        return
    found = operation["responses"]["200"]
    if call.answer is not None:
        found["content"] = {call.kind: {"schema": _add(schemas, call.answer)}}
        if call.event is not None:
            found["content"]["text/event-stream"] = {"schema": _add(schemas, call.event)}
            found["description"] = "With `stream: true` a row of events, their data as shown."
    elif call.kind != "application/json":
        found.pop("content", None)
        if call.kind:
            found["content"] = {call.kind: {"schema": {"type": "string"}}}
    if call.open:
        operation["security"] = []
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None and call.example is not None:
        body["example"] = example_for(call.example, model_name)


def example_for(example: dict[str, Any], model_name: str) -> dict[str, Any]:
    """The example with the name of the model that is served."""
    if example.get("model") == "MODEL":
        return {**example, "model": model_name}
    return example


def _content(schema: dict[str, str]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
