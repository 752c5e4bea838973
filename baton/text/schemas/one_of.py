"""Alternatives of ``oneOf`` of which no value matches two; then it is the same as ``anyOf``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Resolve = Callable[[str], Any]

_ALL = frozenset(("string", "number", "integer", "boolean", "object", "array", "null"))
_MOST_DEPTH = 8
_MOST_BRANCHES = 64
_MOST_WORK = 30_000


@dataclass(slots=True)
class Comparison:
    """Comparison of the alternatives in one schema, which may refer to each other.

    Attributes:
        resolve: Returns the target of a reference.
        left: Values and names that may still be compared.
    """

    resolve: Resolve
    left: int = _MOST_WORK


def excludes(part: Mapping[str, Any], comparison: Comparison) -> bool:
    """Return whether the alternatives of a schema's ``oneOf`` are known to exclude each other.

    Args:
        part: Schema with ``oneOf``.
        comparison: That of the whole schema.
    """
    branches = part["oneOf"]
    if not isinstance(branches, list) or len(branches) > _MOST_BRANCHES:
        return False
    inherited = {key: part[key] for key in ("type", "required") if key in part}
    known = [_Branch(branch, inherited, comparison, _MOST_DEPTH) for branch in branches]
    return all(left.excludes(right) for left, right in combinations(known, 2))


class _Branch:
    def __init__(
        self, schema: Any, inherited: Mapping[str, Any], comparison: Comparison, depth: int
    ) -> None:
        self._comparison = comparison
        self._depth = depth
        self.is_empty = schema is False
        own = schema if isinstance(schema, dict) else {}
        reference = own.get("$ref")
        if isinstance(reference, str) and depth:
            target = comparison.resolve(reference)
            own = {**(target if isinstance(target, dict) else {}), **own}
        self.types = _types(own) & _types(inherited)
        given = own.get("enum", [own["const"]] if "const" in own else None)
        self.values = given if isinstance(given, list) else None
        properties = own.get("properties")
        self.properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self.required = _names(own) | _names(inherited)
        opened = own.get("additionalProperties", "properties" not in own)
        self.is_closed = opened is False and "patternProperties" not in own

    def excludes(self, other: "_Branch") -> bool:
        """Return whether no value is known to match both."""
        for branch in (self, other):
            self._comparison.left -= 1 + len(branch.values or ()) + len(branch.required)
        if self._comparison.left < 0:
            return False
        if self.is_empty or other.is_empty:
            return True
        if self.values is not None and other.values is not None:
            return {*map(_key, self.values)}.isdisjoint(map(_key, other.values))
        if self.kinds().isdisjoint(other.kinds()):
            return True
        if self.kinds() & other.kinds() != {"object"} or not self._depth:
            return False
        return self.lacks(other) or other.lacks(self) or self._differs(other)

    def kinds(self) -> set[str]:
        """Return the JSON types of the values; an integer is a number."""
        if self.values is not None:
            return {_kind(value) for value in self.values}
        return {"number" if kind == "integer" else kind for kind in self.types}

    def lacks(self, other: "_Branch") -> bool:
        """Return whether no object of this branch has a property that ``other`` requires."""
        return self.is_closed and not other.required <= self.properties.keys()

    def _differs(self, other: "_Branch") -> bool:
        """Return whether a property that both require excludes itself."""
        both = self.required & other.required & self.properties.keys()
        return any(
            self.inner(self.properties[name]).excludes(other.inner(other.properties[name]))
            for name in both & other.properties.keys()
        )

    def inner(self, schema: Any) -> "_Branch":
        """Return the branch of a property."""
        return _Branch(schema, {}, self._comparison, self._depth - 1)


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        return _ALL
    named = frozenset(kind for kind in given if isinstance(kind, str))
    return named | {"integer"} if "number" in named else named


def _names(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
