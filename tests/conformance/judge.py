"""Judge of JSON values by a specification's schemas, more exact than the schemas themselves.

Schemas of APIs leave objects open, so that clients accept fields of later versions. Here, an
unknown field is a finding too. A value that may have several forms is compared with the form that
its ``type`` names, so that a finding is at the field at fault and not at the whole value.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

_BRANCHES = ("anyOf", "oneOf", "allOf")
_TAGS = ("type", "object", "role")  # fields that tell the forms of a value apart
_LITERAL = ("enum", "const", "default")  # their values are no schemas
UNKNOWN = "unknown"
MISSING = "missing"
NULL = "null"

Schema = dict[str, Any]


class Finding(NamedTuple):
    """Difference between a value and its schema.

    Attributes:
        at: JSON pointer with ``*`` for the index in a list.
        what: `UNKNOWN` or `MISSING` field, `NULL` where none may be, or the keyword of the schema,
            such as ``type`` or ``enum``.
        detail: Text for people.
    """

    at: str
    what: str
    detail: str


class Judge:
    """Judge by one document, whose ``schemas`` lie where ``place`` says: ``#/$defs/``."""

    def __init__(self, schemas: dict[str, Schema], place: str) -> None:
        self._schemas = schemas
        self._place = place
        folder: Schema = {name: self._closed(schema) for name, schema in schemas.items()}
        for part in reversed(place.strip("#/").split("/")):
            folder = {part: folder}
        self._folder = folder
        self._ready: dict[str, Any] = {}

    def findings(self, value: object, name: str) -> list[Finding]:
        """Return what in ``value`` differs from the schema with this name."""
        validator = self._ready.get(name)
        if validator is None:
            validator = _Exact({**self._closed(self._schemas[name]), **self._folder})
            self._ready[name] = validator
        return [_finding(error) for error in validator.iter_errors(value)]

    def _target(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].removeprefix(self._place)]
        return schema

    def _closed(self, schema: Any, *, top: bool = True) -> Any:
        """Return a schema that names the known fields of objects (``top``: its own as well)."""
        if isinstance(schema, list):
            return [self._closed(entry) for entry in schema]
        if not isinstance(schema, dict):
            return schema
        if schema.get("nullable"):
            plain = {key: value for key, value in schema.items() if key != "nullable"}
            return self._closed({"anyOf": [plain, {"type": "null"}]}, top=top)
        if not top and "$ref" in schema:
            return self._closed(self._target(schema), top=False)
        whole = "properties" in schema or "allOf" in schema
        closed: Schema = {}
        for key, value in schema.items():
            if key in _LITERAL:
                closed[key] = value
            elif key == "properties":
                closed[key] = {name: self._closed(field) for name, field in value.items()}
            elif key in ("anyOf", "oneOf"):
                branches = [self._closed(entry, top=top and not whole) for entry in value]
                forms = [self._tags(entry) for entry in value]
                closed["forms"] = [list(pair) for pair in zip(forms, branches, strict=True)]
            elif key == "allOf":
                closed[key] = [self._closed(entry, top=False) for entry in value]
            else:
                closed[key] = self._closed(value)
        known = self._known(schema) if top and whole else None
        if known is not None:
            closed["known"] = sorted(known)
        return closed

    def _known(self, schema: Schema) -> set[str] | None:
        """Return the fields that an object may have; None if it may have any."""
        schema = self._target(schema)
        if schema.get("additionalProperties", False) is not False:
            return None
        names = set(schema.get("properties", ()))
        for key in _BRANCHES:
            for branch in schema.get(key, ()):
                more = self._known(branch)
                if more is None:
                    return None
                names |= more
        return names

    def _tags(self, schema: Schema) -> Schema:
        """Return what tells a form: its JSON type, and the values of tagging fields."""
        schema = self._target(schema)
        tags: Schema = {}
        for part in schema.get("allOf", ()):
            tags |= self._tags(part)["tags"]
        for name in _TAGS:
            field = schema.get("properties", {}).get(name, {})
            values = [field["const"]] if "const" in field else field.get("enum")
            if values is not None:
                tags[name] = values
        return {"json": schema.get("type"), "tags": tags}


def _check_known(_: Any, known: list[str], value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        for name in value:
            if name not in known:
                yield ValidationError("unknown field", path=(name,), validator=UNKNOWN)


def _check_required(_: Any, names: list[str], value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, dict):
        for name in names:
            if name not in value:
                yield ValidationError("missing field", path=(name,), validator=MISSING)


def _check_forms(
    validator: Any, forms: list[tuple[Schema, Any]], value: Any, _: Any
) -> Iterator[ValidationError]:
    """Yield nothing if one form matches; else the differences from the nearest one."""
    typed = [
        (tags, branch)
        for tags, branch in forms
        if tags["json"] is None or validator.is_type(value, tags["json"])
    ]
    if not typed:
        yield ValidationError(f"{value!r:.60} has no allowed type", validator="type")
        return
    fitting = [branch for tags, branch in typed if _fits(tags["tags"], value)]
    if not fitting:
        tag = next(name for name in _TAGS if name in value)
        yield ValidationError(
            f"{value[tag]!r:.60} is no known value", path=(tag,), validator="enum"
        )
        return
    nearest: list[ValidationError] | None = None
    for branch in fitting:
        errors = list(validator.descend(value, branch))
        if not errors:
            return
        if nearest is None or len(errors) < len(nearest):
            nearest = errors
    yield from nearest or ()


def _fits(tags: Schema, value: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(value[name] in values for name, values in tags.items() if name in value)


_Exact = extend(
    Draft202012Validator,
    {"known": _check_known, "required": _check_required, "forms": _check_forms},
)


def _finding(error: ValidationError) -> Finding:
    steps = ("*" if isinstance(step, int) else str(step) for step in error.absolute_path)
    what = NULL if error.instance is None else str(error.validator)
    return Finding("".join(f"/{step}" for step in steps), what, error.message[:200])
