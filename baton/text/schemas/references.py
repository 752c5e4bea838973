"""References within a JSON schema, whose writers do not always escape the names in them."""

from typing import Any
from urllib.parse import quote, unquote

_SAFE = "/~!$&'()*+,;=:@?-._"
_MOST_SLASHES = 8  # in a name
_MOST_DIGITS = 9


def target(root: Any, reference: Any) -> Any:
    """Return what a reference within ``root`` names; None for other references."""
    path = _path(root, reference)
    for name in path or ():
        root = root[name]
    return None if path is None else root


def escaped(root: Any, reference: str) -> str:
    """Return a reference within ``root`` as RFC 3986 has it; others unchanged."""
    path = _path(root, reference)
    if path is None:
        return reference
    steps = (str(name).replace("~", "~0").replace("/", "~1") for name in path)
    return "#" + "".join("/" + quote(step, safe=_SAFE) for step in steps)


def _path(root: Any, reference: Any) -> list[str | int] | None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    head, *steps = reference.removeprefix("#").split("/")
    return None if head else _found(root, steps)


def _found(node: Any, steps: list[str]) -> list[str | int] | None:
    """Return the path of steps, of which several may be one name with slashes."""
    found: list[str | int] = []
    while steps:
        if isinstance(node, list):
            is_number = steps[0].isdecimal() and len(steps[0]) <= _MOST_DIGITS
            index = int(steps[0]) if is_number else len(node)
            name: str | int | None = index if index < len(node) else None
            used = 1
        elif isinstance(node, dict):
            name, used = _name(node, steps)
        else:
            return None
        if name is None:
            return None
        found.append(name)
        node = node[name]
        steps = steps[used:]
    return found


def _name(node: dict[str, Any], steps: list[str]) -> tuple[str | None, int]:
    for used in range(1, min(len(steps), _MOST_SLASHES + 1) + 1):
        literal = "/".join(steps[:used])
        for name in (literal, _unescaped(literal), _unescaped(unquote(literal))):
            if name in node:
                return name, used
    return None, 0


def _unescaped(text: str) -> str:
    return text.replace("~1", "/").replace("~0", "~")
