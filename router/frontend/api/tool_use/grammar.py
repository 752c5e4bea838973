"""Grammar of calls; only tools with ``strict: true`` may be rejected because of their schema.

    level 0   the schema; keywords that no grammar can enforce are ignored
    level 1   its types, properties and values
    level 2   any object

A tool that is not strict gets the lowest level that compiles. Parts that are not enforced are
listed in ``x-baton-ignored``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from baton.text.calls.grammar import Choice, calls_grammar, of_object
from baton.text.grammar import MAX_SOURCE_CHARACTERS
from baton.text.json_schema import lenient, ready, relaxed, unenforced
from baton.text.tools import Tool, ToolSyntax
from baton.types.errors import GrammarError

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
MOST_LEVEL = 2
_KEPT = 64
_KEPT_CHARACTERS = 1 << 20  # longer lists of tools are not kept

Levels = Mapping[str, int]
"""Level by name of a tool; 0 for others."""


class CallsGrammar(NamedTuple):
    """Grammar of an answer that may call tools.

    Attributes:
        source: Lark grammar.
        ignored: Parts of the tools that it does not enforce, such as ``search.uniqueItems``.
        checked: Schemas that complete arguments are checked against, by name of the tool.
    """

    source: str
    ignored: tuple[str, ...]
    checked: Mapping[str, str]


def calls_grammar_of(
    tools: Sequence[Tool],
    choice: Choice,
    syntax: ToolSyntax,
    *,
    parallel: bool,
    levels: Levels | None = None,
) -> CallsGrammar:
    """Return the grammar of an answer that may call ``tools``, at least one.

    Raises:
        GrammarError: The schema of a strict tool cannot be enforced.
    """
    known = levels or {}
    parts = [[t.name, t.lenient, t.parameters, known.get(t.name, 0)] for t in tools]
    key = json.dumps(parts)
    make = _grammar if len(key) <= _KEPT_CHARACTERS else _grammar.__wrapped__
    return make(key, choice, syntax, parallel=parallel)


@lru_cache(_KEPT)
def _grammar(key: str, choice: Choice, syntax: ToolSyntax, *, parallel: bool) -> CallsGrammar:
    tools = []
    ignored: list[str] = []
    checked = {}
    for name, is_lenient, parameters, least in json.loads(key):
        tool = Tool(name=name, description=None, parameters=parameters, lenient=is_lenient)
        level = least if is_lenient else 0
        while is_lenient and level < MOST_LEVEL and not _is_ready(tool, level):
            level += 1
        tools.append(at_level(tool, level))
        left_out = unenforced(parameters) if is_lenient and parameters and not level else []
        if left_out:
            checked[name] = json.dumps(parameters)
        ignored += [f"{name}.{word}" for word in (left_out if not level else ["parameters"])]
    try:
        source = calls_grammar(tools, choice, parallel=parallel, syntax=syntax)
    except GrammarError as error:
        raise GrammarError.at("tools", f"{error.message}") from error
    return CallsGrammar(source, tuple(ignored), checked)


def at_level(tool: Tool, level: int) -> Tool:
    """Return the tool with as much of its schema as ``level`` enforces."""
    if not level or tool.parameters is None:
        return tool
    return replace(tool, parameters=relaxed(tool.parameters) if level == 1 else ANY_OBJECT)


def schema_at(tool: Tool, level: int) -> str:
    """Return the schema that ``level`` enforces, as JSON."""
    return json.dumps(lenient(_at(tool, level)))


def _at(tool: Tool, level: int) -> dict[str, Any]:
    return of_object(at_level(tool, level).parameters or ANY_OBJECT)


def _is_ready(tool: Tool, level: int) -> bool:
    try:
        schema = ready(lenient(_at(tool, level)))
    except GrammarError:
        return False
    return len(json.dumps(schema)) <= MAX_SOURCE_CHARACTERS
