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
_MOST_PARTS = 64  # of a parameter's schema
_JOINTS = ("anyOf", "oneOf")


def kind_of(schema: Any, root: Mapping[str, Any]) -> Kind:
    """Return the kind of a parameter.

    Args:
        schema: JSON schema of the parameter.
        root: Schema of all parameters, which holds the definitions.
    """
    types = _types(schema, root)
    if not types:
        return "mixed"
    if types == {"string"}:
        return "text"
    return "mixed" if "string" in types else "json"


def _types(schema: Any, root: Mapping[str, Any]) -> set[str] | None:
    """Return the JSON types that a schema allows; None if any or not known.

    Each part is read once, as they may refer to each other.
    """
    types: set[str] = set()
    parts = [schema]
    read: set[int] = set()
    while parts:
        part = parts.pop()
        if not isinstance(part, dict) or len(read) == _MOST_PARTS:
            return None
        if id(part) in read:
            continue
        read.add(id(part))
        values = part.get("enum", [part["const"]] if "const" in part else None)
        reference = part.get("$ref")
        joined = [part[joint] for joint in _JOINTS if isinstance(part.get(joint), list)]
        if "type" in part:
            given = part["type"] if isinstance(part["type"], list) else [part["type"]]
            types |= {kind for kind in given if isinstance(kind, str)}
        elif isinstance(values, list):
            types |= {"string" if isinstance(value, str) else "other" for value in values}
        elif isinstance(reference, str) and reference.startswith("#/"):
            parts.append(target(root, reference))
        elif joined:
            parts += joined[0]
        else:
            return None
    return types


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
