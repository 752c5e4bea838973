"""YAML parser that records the line of each key, for error messages."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml

from baton.printable import UNPRINTABLE

KeyPath = tuple[str | int, ...]
_MAX_DEPTH = 8
_MAX_PLACES = 100_000  # aliases of aliases multiply: a few lines can stand for 10^9 values
_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_NOT_DECIMAL = re.compile(r"[-+]?0[0-7_]+|.*:.*")  # 010 is 8 and 1:30 is 90 in YAML 1.1


class YamlTextError(ValueError):
    """Text that cannot be used; lines are counted from 1."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(f"{line}: {problem}" if line is not None else f" {problem}")


class Parsed(NamedTuple):
    """Data of a text, and the line of every key and list item."""

    data: dict[str, Any]
    lines: dict[KeyPath, int]


def parse_yaml(text: str, what: str, redact: Callable[[KeyPath], KeyPath]) -> Parsed:
    """Parse a text of ``key: value`` lines that gives each key once.

    Args:
        text: YAML text.
        what: Description of the text for error messages.
        redact: Function that removes secrets from a key's path, for error messages.

    Raises:
        YamlTextError: The text is not such a mapping; the message has the line.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Parsed({}, lines)
            if not isinstance(root, yaml.MappingNode):
                raise YamlTextError(f"{what} must consist of `key: value` lines", 1)
            _note_lines(root, (), lines, redact)
            return Parsed(loader.construct_document(root), lines)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlTextError(f"not valid YAML: {error.problem}", line) from error
    except yaml.YAMLError as error:
        raise YamlTextError(f"not valid YAML: {error}") from error
    except RecursionError:
        raise YamlTextError("nested too deeply") from None


def dotted(path: KeyPath) -> str:
    """Return a key's path as users write it: ``pools.decode``, ``cors_origins[0]``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _note_lines(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], redact: Callable[[KeyPath], KeyPath]
) -> None:
    line = node.start_mark.line + 1
    if len(path) > _MAX_DEPTH:  # an alias may contain itself
        raise YamlTextError("nested too deeply", line)
    if len(lines) > _MAX_PLACES:
        raise YamlTextError(
            f"more than {_MAX_PLACES} values: aliases (`*name`) multiply them", line
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _note_key(key, path, lines, redact)
            _note_lines(value, (*path, str(key.value)), lines, redact)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _note_lines(value, (*path, index), lines, redact)
    elif isinstance(node, yaml.ScalarNode):
        _check_scalar(node, path, redact)


def _note_key(
    key: yaml.Node, parent: KeyPath, lines: dict[KeyPath, int], redact: Callable[[KeyPath], KeyPath]
) -> None:
    path = (*parent, str(key.value))
    line = key.start_mark.line + 1
    shown = dotted(redact(path))
    _check_printable(key.value, line)
    if isinstance(key, yaml.ScalarNode) and key.tag not in _TEXT:
        raise YamlTextError(f"{shown}: a key must be text: put it in quotes", line)
    if path in lines:
        raise YamlTextError(f"{shown} is given twice (first on line {lines[path]})", line)
    lines[path] = line


def _check_scalar(
    node: yaml.ScalarNode, path: KeyPath, redact: Callable[[KeyPath], KeyPath]
) -> None:
    """Refuse what cannot be printed, unusual numbers, and invalid ones, such as 5,000 digits."""
    line = node.start_mark.line + 1
    _check_printable(node.value, line)
    loader = yaml.SafeLoader("")
    try:
        if node.tag in _NUMBERS and _NOT_DECIMAL.fullmatch(node.value):
            raise ValueError(f"{node.value} is not a decimal number")
        loader.construct_object(node)
    except ValueError as error:
        shown = dotted(redact(path))
        problem = f"{shown}: not a valid value: {error}; put text in quotes"
        raise YamlTextError(problem, line) from error
    finally:
        loader.dispose()


def _check_printable(text: object, line: int) -> None:
    if found := UNPRINTABLE.search(f"{text}"):
        raise YamlTextError(f"contains {found[0]!a}, which cannot be printed", line)
