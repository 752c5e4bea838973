"""Preparation of JSON schemas for a grammar: objects are closed, unsupported keywords reported.

As in OpenAI's strict mode and in vLLM, an object has only the properties in its schema, unless that
contains ``additionalProperties``: otherwise a model writes further keys until ``max_tokens``. Of
joined schemas (``allOf``, or ``properties`` beside ``anyOf`` or ``$ref``) the whole is closed, not
its parts, which would forbid each other's keys.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from baton.text.schemas.numbers import changed, narrow
from baton.text.schemas.one_of import Comparison, excludes
from baton.text.schemas.references import escaped, target
from baton.types.errors import GrammarError

# White space between the parts of a JSON text: none, one space, or a new line with its indent.
# Without a bound a weak model writes white space until max_tokens.
_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,32})"}
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    "uri",
)
UNFOLLOWED_KEYWORDS = frozenset(
    (
        *("not", "if", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "oneOf"),
    )
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items: a list in older drafts
_SINGLE = (
    *("items", "additionalItems", "additionalProperties", "propertyNames", "contains"),
    *("not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems"),
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "$comment"),
        *("deprecated", "readOnly", "writeOnly"),
    )
)
_JOINTS = ("allOf", "anyOf", "oneOf")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_NAMING_PROPERTIES = frozenset(("patternProperties", "allOf", "oneOf", "dependentSchemas", "$ref"))
_RELAXED_KEYWORDS: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    "properties": dict,
    "required": list,
    "additionalProperties": (bool, dict),
    "items": dict,
    "enum": list,
    "const": object,
    "anyOf": list,
    "$ref": str,
    "$defs": dict,
    "definitions": dict,
}
_DEFINITIONS = ("$defs", "definitions")
_MAX_COPIES = 32  # copies of referenced schemas
_MAX_COPIED_PARTS = 4096  # subschemas in all copies

Schema = dict[str, Any]


class Unfollowed(NamedTuple):
    """Keyword that no grammar can enforce, and its place as a JSON pointer."""

    keyword: str
    place: str


def ready(schema: Any) -> Any:
    """Return a copy of a client's schema with closed objects, for a grammar.

    With ``x-guidance: {lenient: true}`` keywords that a grammar cannot enforce are left out;
    otherwise they raise ``GrammarError``.
    """
    if not isinstance(schema, dict):
        return schema
    found: Schema = _copied(schema)
    options = found.get("x-guidance")
    strict = not (isinstance(options, dict) and options.get("lenient") is True)
    _rewrite(found)
    unfollowed = next(unfollowed_in(found), None)
    if unfollowed is not None and strict:
        raise GrammarError(
            f"the keyword {unfollowed.keyword} at {unfollowed.place} cannot be enforced during "
            "generation; remove it, or set strict: false to have it checked afterwards"
        )
    for _, part in list(_parts(found, "#")):
        for keyword in list(changed(part)):
            del part[keyword]
        if "oneOf" in part:
            _join(part)
    _Closer(found).close()
    found["x-guidance"] = {**_OPTIONS, **(options if isinstance(options, dict) else {})}
    return found


def without_annotations(schema: Any) -> Any:
    """Return a copy of a schema without keywords that do not affect the response's shape.

    Descriptions are for the model, which reads them in the prompt. They are most of a long schema.
    """
    found = _copied(schema)
    for _, part in _parts(found, "#"):
        _drop_annotations(part)
    return found


def _drop_annotations(part: Schema) -> None:
    for keyword in part.keys() & _ANNOTATIONS:
        del part[keyword]


def lenient(schema: Schema) -> Schema:
    """Return the schema with the option to ignore keywords that no grammar can enforce."""
    options = schema.get("x-guidance")
    return {
        **schema,
        "x-guidance": {**(options if isinstance(options, dict) else {}), "lenient": True},
    }


def relaxed(schema: Schema) -> Schema:
    """Return a schema's types, properties and values: what a grammar can enforce of nearly any."""
    found: Schema = _copied(schema)
    for _, part in list(_parts(found, "#")):
        if part.keys() & _NAMING_PROPERTIES:  # they may name any
            part["additionalProperties"] = True
        for keyword in part.keys() - _RELAXED_KEYWORDS.keys():
            del part[keyword]
        for keyword in [k for k, kind in _RELAXED_KEYWORDS.items() if k in part]:
            if not isinstance(part[keyword], _RELAXED_KEYWORDS[keyword]):
                del part[keyword]
        kinds = part.get("type", "object")
        if any(kind not in _TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
            del part["type"]
        if "$ref" in part and not part["$ref"].startswith("#"):
            del part["$ref"]
    return lenient(found)


def unenforced(schema: Schema) -> list[str]:
    """Return the keywords of a schema that no grammar can enforce, each once."""
    found: Schema = _copied(schema)
    _rewrite(found)
    return list(dict.fromkeys(item.keyword for item in unfollowed_in(found)))


def checked_afterwards(schema: Schema) -> bool:
    """Return whether a schema has keywords that no grammar can enforce."""
    return bool(unenforced(schema))


def unfollowed_in(schema: Any) -> Iterator[Unfollowed]:
    """Yield the keywords of a schema that no grammar can enforce."""
    for place, part in _parts(schema, "#"):
        for keyword in part.keys() & UNFOLLOWED_KEYWORDS:
            if not _has_no_effect(keyword, part):
                yield Unfollowed(keyword, f"{place}/{keyword}")
        for keyword in changed(part):
            yield Unfollowed(keyword, f"{place}/{keyword}")


def _has_no_effect(keyword: str, part: Schema) -> bool:
    if keyword in ("minContains", "maxContains"):
        return "contains" not in part
    return part[keyword] in ((False,) if keyword == "uniqueItems" else (True, {}, None))


def _parts(schema: Any, place: str) -> Iterator[tuple[str, Schema]]:
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword, inner in schema.items():
        if keyword in _MAPS:
            for name, part in inner.items() if isinstance(inner, dict) else ():
                yield from _parts(part, f"{place}/{keyword}/{name}")
        elif keyword in _LISTS and isinstance(inner, list):
            for index, part in enumerate(inner):
                yield from _parts(part, f"{place}/{keyword}/{index}")
        elif keyword in _SINGLE:
            yield from _parts(inner, f"{place}/{keyword}")


def _copied(value: Any) -> Any:
    """Return a copy of JSON, much faster than ``copy.deepcopy``."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _rewrite(schema: Schema) -> None:
    """Replace keywords by equivalents that a grammar supports."""
    comparison = Comparison(partial(target, schema))
    for _, part in list(_parts(schema, "#")):
        _drop_annotations(part)
        narrow(part)
        if isinstance(part.get("$ref"), str):
            part["$ref"] = escaped(schema, part["$ref"])
        if "oneOf" in part and excludes(part, comparison):
            _join(part)
        known = isinstance(part.get("format"), str) and part["format"] in _FORMATS
        if "format" in part and not known:
            del part["format"]  # unknown formats are annotations by the standard
        if part.get("unevaluatedProperties") is False:
            del part["unevaluatedProperties"]  # objects are closed anyway
        for keyword in [k for k in part.keys() & UNFOLLOWED_KEYWORDS if _has_no_effect(k, part)]:
            del part[keyword]
        if "if" not in part:
            part.pop("then", None)
            part.pop("else", None)
        _rewrite_names(part)


def _join(part: Schema) -> None:
    """Replace ``oneOf`` by ``anyOf``, which the grammar follows."""
    branches = part.pop("oneOf")
    if "anyOf" not in part:
        part["anyOf"] = branches
    else:
        part["allOf"] = [*_list(part, "allOf"), {"anyOf": branches}]


def _rewrite_names(part: Schema) -> None:
    """Rewrite ``propertyNames`` with a pattern or list, if no property is named otherwise."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties"} & part.keys():
        return
    rest = names.keys() - {"type"}
    values = part.get("additionalProperties", True)
    if rest == {"pattern"} and isinstance(names["pattern"], str):
        part["patternProperties"] = {names["pattern"]: values}
    elif rest == {"enum"} and all(isinstance(name, str) for name in _list(names, "enum")):
        part["properties"] = dict.fromkeys(_list(names, "enum"), values)
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


class _Closer:
    def __init__(self, root: Schema) -> None:
        self._untouched = _copied(root)
        self._joined: set[int] = set()  # parts of joined schemas, which only the whole closes
        self._todo = deque(part for _, part in _parts(root, "#"))  # a schema before its parts
        self._copies = self._copied_parts = 0

    def close(self) -> None:
        while self._todo:
            part = self._todo.popleft()
            if id(part) not in self._joined:
                self._close(part)

    def _close(self, part: Schema) -> None:
        has_own = "properties" in part or "patternProperties" in part
        if not _joins(part, has_own):
            if has_own and "additionalProperties" not in part:
                is_known = isinstance(part.get("properties", {}), dict)  # else the compiler refuses
                for name in _required(part) if is_known else ():
                    part.setdefault("properties", {}).setdefault(name, True)
                part["additionalProperties"] = False
            return
        self._take_apart(part)
        names = _names(part)
        own = part.setdefault("properties", {})
        if names is None or "additionalProperties" in part:
            return
        for name in names:
            own.setdefault(name, True)
        part["additionalProperties"] = False

    def _take_apart(self, part: Schema) -> None:
        """Mark joined schemas, after copying those that are referenced elsewhere."""
        if self._target(part.get("$ref")) is not None:
            reference = {"$ref": part.pop("$ref")}
            part["allOf"] = [*_list(part, "allOf"), reference]
        for keyword in _JOINTS:
            inner = _list(part, keyword)
            for index, item in enumerate(inner):
                inner[index] = item = self._own_copy(item)
                if isinstance(item, dict):
                    self._joined.add(id(item))
                    self._take_apart(item)

    def _own_copy(self, item: Any) -> Any:
        target = self._target(item["$ref"]) if isinstance(item, dict) and "$ref" in item else None
        if not isinstance(target, dict):
            return item
        self._copies += 1
        if self._copies > _MAX_COPIES or self._copied_parts > _MAX_COPIED_PARTS:
            raise GrammarError(
                f"more than {_MAX_COPIES} references are joined to schemas, or they are too large"
            )
        found: Schema = _copied({k: v for k, v in target.items() if k not in _DEFINITIONS})
        found |= {key: value for key, value in item.items() if key != "$ref"}
        before = len(self._todo)
        self._todo.extend(part for _, part in _parts(found, "#"))
        self._copied_parts += len(self._todo) - before
        return found

    def _target(self, reference: Any) -> Any:
        """Return the target of a reference within the schema; None for other references."""
        return target(self._untouched, reference)


def _joins(part: Schema, has_own: bool) -> bool:
    joints = [keyword for keyword in (*_JOINTS, "$ref") if keyword in part]
    several = len(_list(part, "allOf")) > 1
    return bool(joints) and (has_own or several or len(joints) > 1)


def _names(part: Any, depth: int = 0) -> list[str] | None:
    """Return the properties of a schema and its parts; None if it may have others."""
    if not isinstance(part, dict):
        return [] if part is False else None
    kinds = part.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return []
    own = part.get("properties", {})
    opened = part.get("additionalProperties", False) is not False or "patternProperties" in part
    if "$ref" in part or opened or not isinstance(own, dict) or depth > _MAX_COPIES:
        return None
    names = [*own, *_required(part)]
    for keyword in _JOINTS:
        for item in _list(part, keyword):
            inner = _names(item, depth + 1)
            if inner is None:
                return None
            names += inner
    return names


def _required(part: Schema) -> list[str]:
    return [name for name in _list(part, "required") if isinstance(name, str)]


def _list(part: Schema, keyword: str) -> list[Any]:
    found = part.get(keyword)
    return found if isinstance(found, list) else []
