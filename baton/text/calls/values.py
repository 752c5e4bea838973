"""Values of parameters that are written outside JSON: which are text, and their JSON.

Formats with one tag per parameter (Qwen3-Coder, GLM) write strings as they are and other values as
JSON. So the function's schema determines what a value means.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json

from baton.text.schemas.references import target

Kind = Literal["text", "json", "mixed"]
"""``text``: always a string; ``json``: never a string; ``mixed``: the value decides."""

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # some chat templates write these
_MAX_REFERENCES = 16
_JOINTS = ("anyOf", "oneOf")


def kind_of(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Return the kind of a parameter.

    Args:
        schema: JSON schema of the parameter.
        root: Schema of all parameters, which holds the definitions.
    """
    types = _types(schema, root, _MAX_REFERENCES)
    if not types:
        return "mixed"
    if types == {"string"}:
        return "text"
    return "mixed" if "string" in types else "json"


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str] | None:
    """Return the JSON types that a schema allows; None if any or not known."""
    if not isinstance(schema, dict) or depth == 0:
        return None
    if "type" in schema:
        given = schema["type"]
        return {t for t in (given if isinstance(given, list) else [given]) if isinstance(t, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {"string" if isinstance(value, str) else "other" for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _types(target(root, reference), root, depth - 1)
    for joint in _JOINTS:
        if isinstance(schema.get(joint), list):
            parts = [_types(part, root, depth - 1) for part in schema[joint]]
            known = [part for part in parts if part is not None]
            return set().union(*known) if len(known) == len(parts) else None
    return None


def text_choices(schema: Any) -> list[str]:
    """Return the texts that a parameter allows, if they are listed; otherwise none."""
    if not isinstance(schema, dict):
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return []
    return values


def kinds_of(parameters: Mapping[str, Any] | None) -> dict[str, Kind]:
    """Return the kinds of a function's parameters by their names."""
    root = parameters or {}
    properties = root.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: kind_of(schema, root) for name, schema in properties.items()}


def as_json(text: str, kind: Kind) -> str:
    """Return the JSON of a complete value; a text that is no JSON becomes a string."""
    stripped = text.strip()
    if kind != "text":
        candidate = _PYTHON.get(stripped, stripped) if kind == "json" else stripped
        try:
            value = from_json(candidate, allow_inf_nan=False)
        except ValueError:
            pass
        else:
            if kind == "json" or not isinstance(value, str):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def begin_of_json(text: str, kind: Kind) -> str:
    """Return the JSON of a value that is cut off; a text that begins no JSON becomes a string."""
    stripped = text.strip()
    if kind == "json":
        try:
            from_json(stripped, allow_inf_nan=False, allow_partial=True)
        except ValueError:
            pass
        else:
            return stripped
    return f'"{escaped(text)}' if stripped else ""


def escaped(text: str) -> str:
    """Return a piece of a JSON string without quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
