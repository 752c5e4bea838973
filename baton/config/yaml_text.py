"""Parse YAML that people write: its data, and the line of each key for error messages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import yaml

Place = tuple[str | int, ...]
_MAX_DEPTH = 8
_MAX_PLACES = 100_000  # aliases of aliases multiply: a few lines can stand for 10^9 values
_TEXT = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class YamlTextError(ValueError):
    """A text that cannot be used.

    Args:
        problem: What is wrong with it.
        line: Where, counted from 1; None: not known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(f"{line}: {problem}" if line is not None else f" {problem}")


class Parsed(NamedTuple):
    """The data of a text, and the line of every key and every item of a list."""

    data: dict[str, Any]
    lines: dict[Place, int]


def parse_yaml(text: str, what: str, told: Callable[[Place], Place]) -> Parsed:
    """A text of ``key: value`` lines, each key given once.

    Args:
        text: The text.
        what: What it is, for messages.
        told: A place as messages may name it: without what is secret.

    Raises:
        YamlTextError: It is something else; the message has the line.
    """
    lines: dict[Place, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Parsed({}, lines)
            if not isinstance(root, yaml.MappingNode):
                raise YamlTextError(f"{what} holds `key: value` lines", 1)
            _note_lines(root, (), lines, told)
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


def dotted(place: Place) -> str:
    """A place as people write it: ``pools.decode``, ``cors_origins[0]``."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _note_lines(
    node: yaml.Node, where: Place, lines: dict[Place, int], told: Callable[[Place], Place]
) -> None:
    line = node.start_mark.line + 1
    if len(where) > _MAX_DEPTH:  # an alias may contain itself
        raise YamlTextError("nested too deeply", line)
    if len(lines) > _MAX_PLACES:
        raise YamlTextError(
            f"more than {_MAX_PLACES} values: aliases (`*name`) multiply them", line
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _note_key(key, where, lines, told)
            _note_lines(value, (*where, str(key.value)), lines, told)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*where, index)] = value.start_mark.line + 1
            _note_lines(value, (*where, index), lines, told)
    elif isinstance(node, yaml.ScalarNode):
        _try(node, where, told)


def _note_key(
    key: yaml.Node, where: Place, lines: dict[Place, int], told: Callable[[Place], Place]
) -> None:
    place = (*where, str(key.value))
    line = key.start_mark.line + 1
    shown = dotted(told(place))
    if isinstance(key, yaml.ScalarNode) and key.tag not in _TEXT:
        raise YamlTextError(f"{shown}: a key is a text: put it in quotes", line)
    if place in lines:
        raise YamlTextError(f"{shown} is given twice (first on line {lines[place]})", line)
    lines[place] = line


def _try(node: yaml.ScalarNode, where: Place, told: Callable[[Place], Place]) -> None:
    """Refuse what looks like a date or a number and is none: 2024-99-99, or 5,000 digits."""
    loader = yaml.SafeLoader("")
    try:
        loader.construct_object(node)
    except ValueError as error:
        shown = dotted(told(where))
        raise YamlTextError(
            f"{shown}: not a value: {error}; a text stands in quotes", node.start_mark.line + 1
        ) from error
    finally:
        loader.dispose()
