"""OpenAPI document: adds bodies, responses, examples and API keys to what FastAPI generates.

``answers.yaml`` contains the responses and examples; classes define the request bodies.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from fastapi import FastAPI
from pydantic import BaseModel

_ANSWERS = Path(__file__).with_name("answers.yaml")
_REF = "#/components/schemas/{model}"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key from `api_keys`."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def described() -> dict[str, Any]:
    """Return the content of ``answers.yaml``: ``schemas`` by name, ``calls`` by method and path."""
    document: dict[str, Any] = yaml.safe_load(_ANSWERS.read_text(encoding="utf-8"))
    return document


def describe(
    app: FastAPI, bodies: Iterable[type[BaseModel]], model_name: str, *, has_keys: bool
) -> None:
    """Complete ``/openapi.json``.

    The document is built on the first request, which takes 0.1 s, and is then reused.

    Args:
        app: Application to describe.
        bodies: Classes of request bodies, which endpoints parse themselves.
        model_name: Model name for the examples.
        has_keys: Whether the fleet has API keys. Otherwise keys are optional and ignored.
    """
    generate = app.openapi
    kinds = list(bodies)

    @cache
    def openapi() -> dict[str, Any]:
        answers = described()
        document = generate()
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        components["securitySchemes"] = _KEYS
        document["security"] = [{name: []} for name in _KEYS] + ([] if has_keys else [{}])
        schemas.update(answers["schemas"])
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=_REF)
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                _complete(operation, answers["calls"].get(f"{method} {path}"), model_name)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: dict[str, Any], call: dict[str, Any] | None, model_name: str) -> None:
    error = _content("Error" if call is None else call.get("error", "Error"))
    operation["responses"].setdefault("default", {"description": "Error"} | error)
    if call is None:
        return
    answer = operation["responses"]["200"]
    kind = call.get("kind", "application/json")
    if "answer" in call:
        answer |= _content(call["answer"], kind)
    elif kind != "application/json":
        answer.pop("content", None)
        if kind:
            answer["content"] = {kind: {"schema": {"type": "string"}}}
    if "event" in call:
        answer["content"] |= _content(call["event"], "text/event-stream")["content"]
        answer["description"] = "With `stream: true`, server-sent events with data of this form."
    if call.get("open"):
        operation["security"] = []
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None and "example" in call:
        body["example"] = example_for(call["example"], model_name)


def example_for(example: dict[str, Any], model_name: str) -> dict[str, Any]:
    """Return the example with the name of the served model."""
    if example.get("model") == "MODEL":
        return {**example, "model": model_name}
    return example


def _content(name: str, kind: str = "application/json") -> dict[str, Any]:
    return {"content": {kind: {"schema": {"$ref": _REF.format(model=name)}}}}
