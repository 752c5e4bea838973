"""Completes what FastAPI generates: bodies, answers, examples, keys.

Answers and examples stand in ``answers.yaml``, the bodies of requests in their classes.
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
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `api_keys`."},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def described() -> dict[str, Any]:
    """Return what ``answers.yaml`` holds: ``schemas`` by name, ``calls`` by method and path."""
    document: dict[str, Any] = yaml.safe_load(_ANSWERS.read_text(encoding="utf-8"))
    return document


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
    operation["responses"].setdefault("default", {"description": "What went wrong"} | error)
    if call is None:
        return
    found = operation["responses"]["200"]
    kind = call.get("kind", "application/json")
    if "answer" in call:
        found |= _content(call["answer"], kind)
    elif kind != "application/json":
        found.pop("content", None)
        if kind:
            found["content"] = {kind: {"schema": {"type": "string"}}}
    if "event" in call:
        found["content"] |= _content(call["event"], "text/event-stream")["content"]
        found["description"] = "With `stream: true` a row of events, their data as shown."
    if call.get("open"):
        operation["security"] = []
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None and "example" in call:
        body["example"] = example_for(call["example"], model_name)


def example_for(example: dict[str, Any], model_name: str) -> dict[str, Any]:
    """The example with the name of the model that is served."""
    if example.get("model") == "MODEL":
        return {**example, "model": model_name}
    return example


def _content(name: str, kind: str = "application/json") -> dict[str, Any]:
    return {"content": {kind: {"schema": {"$ref": _REF.format(model=name)}}}}
