"""Grammar of responses that contain tool calls, in the format of a model family."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from baton.text.calls.formats import Parameters
from baton.text.calls.patterns import Free, Part
from baton.text.calls.values import kind_of, text_choices
from baton.text.grammar import MAX_SOURCE_CHARACTERS
from baton.text.json_schema import lenient, ready, without_annotations
from baton.text.tools import Tool, ToolSyntax
from baton.types.errors import GrammarError

MAX_CALLS = 8
"""Limit of required calls in one response: a weak model would never stop."""

_MAX_FREE_PARAMETERS = 32
_SAYING_MORE = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf"),
)
_DEFINITIONS = ("$defs", "definitions")
_TERMINALS = (  # each uses only those before it
    ("CALL_ID", "CALL_ID: /[a-zA-Z0-9]{9}/"),
    ("optional_id", 'optional_id: (", \\"id\\": \\"" CALL_ID "\\"")?'),
    ("gap", "gap: /\\n?/"),
    ("KEY", "KEY: /[^<>\\n]{1,256}/"),
)
_TEXT = "TEXT: /(.|\\n)*/"
_TEXT_BUT_A_CALL = 'TEXT: /(.|\\n)*/ & ~/[ \\n]*\\{[ \\n]*"name"(.|\\n)*/'

Choice = Literal["auto", "required"]


def calls_grammar(
    tools: Sequence[Tool], choice: Choice, *, parallel: bool, syntax: ToolSyntax
) -> str:
    """Return a Lark grammar of responses with calls.

    Args:
        tools: Callable tools, at least one.
        choice: ``auto``: text in which a started call is completed; ``required``: only calls.
        parallel: Whether a response may contain several calls, if the format has several.
        syntax: Syntax of the model.

    Raises:
        GrammarError: A schema cannot be enforced.
    """
    return _Writer(syntax, parallel=parallel).grammar(tools, choice)


class _Writer:
    """Writer of one grammar: blocks of calls, which begin with a tag, and text around them."""

    def __init__(self, syntax: ToolSyntax, *, parallel: bool) -> None:
        self._format = syntax.format
        self._written = syntax.format.written
        self._token_ids = syntax.token_ids
        self._parallel = parallel and not syntax.format.single
        self._values: dict[str, str] = {}  # grammar of a value to the name of its rule
        self._left = MAX_SOURCE_CHARACTERS
        self._parts: dict[str, str] = {}  # of one tool, by the schema of a parameter

    def grammar(self, tools: Sequence[Tool], choice: Choice) -> str:
        functions = [self._function(index, tool) for index, tool in enumerate(tools)]
        names = " | ".join(f"function_{index}" for index in range(len(tools)))
        rules = [
            *(self._only_calls() if choice == "required" else self._answers()),
            *self._block(),
            f"function: {names}",
            *functions,
            *(f"{name}{grammar}" for grammar, name in self._values.items()),
        ]
        text = "\n".join(rules)
        for name, terminal in reversed(_TERMINALS):
            if name in text:
                text += f"\n{terminal}"
        return text

    def _only_calls(self) -> list[str]:
        blocks = "block" if self._written.is_list else self._several("block")
        return [f"start: {blocks}", f"block: {self._tag()} rest"]

    def _answers(self) -> list[str]:
        if self._format.in_channels:
            channel = self._lark("<|channel|>")
            message = self._lark("<|message|>")
            end = self._lark("<|end|>", "<|start|>", "assistant")
            return [
                f"start: preamble{{0,{MAX_CALLS}}} (answer | block)",
                f'preamble: {channel} "commentary" {message} TEXT {end}',
                f'answer: ({channel} "final" {message})? TEXT',
                _TEXT,
                f"block: {self._tag()} rest",
            ]
        if self._format.bare:
            return ["start: TEXT | block", _TEXT_BUT_A_CALL, f"block: {self._tag()} rest"]
        # Lazy: a complete tag ends the text. A special token ends it anyway.
        lazy = "" if self._opening[0] in self._token_ids else "[lazy]"
        return [
            "start: block* TEXT" if self._parallel else "start: TEXT | block",
            _TEXT,
            f"head{lazy}: TEXT {self._tag()}",
            "block: head rest",
        ]

    @property
    def _opening(self) -> tuple[Part, ...]:
        return self._written.first + self._written.begin

    def _tag(self) -> str:
        """Return the first tag of a block."""
        tag = self._lark(self._opening[0])
        return f"({self._lark(*self._format.tags)})? {tag}" if self._format.bare else tag

    def _block(self) -> list[str]:
        written = self._written
        if not written.is_list:
            inner = self._lark(*self._opening[1:])
            return [f"rest: {inner} function {self._lark(*written.end)}"]
        return [
            f"rest: {self._lark(*written.first[1:])} {self._several('call')} "
            f"{self._lark(*written.last)}",
            f"call: {self._lark(*written.begin)} function {self._lark(*written.end)}",
        ]

    def _several(self, rule: str) -> str:
        if not self._parallel:
            return rule
        return f"{rule} ({self._lark(*self._written.between)} {rule}){{0,{MAX_CALLS - 1}}}"

    def _lark(self, *parts: Part) -> str:
        """Return parts as Lark; tags that are special tokens are written by id."""
        found = []
        for part in parts:
            if isinstance(part, Free):
                found.append(part.grammar)
            elif part in self._token_ids:
                found.append(f"<[{self._token_ids[part]}]>")
            else:
                found.append(_quoted(part))
        return " ".join(found)

    def _function(self, index: int, tool: Tool) -> str:
        tags = self._format.parameters
        if tags is None:
            arguments = self._value(f": %json {json.dumps(_schema(tool))}")
        else:
            arguments = self._parameters(tool, tags)
        middle = self._lark(*self._written.middle)
        return f"function_{index}: {_quoted(tool.name)} {middle} {arguments}"

    def _value(self, grammar: str) -> str:
        """Return the rule of a grammar; equal ones share a rule, which is compiled once."""
        if grammar not in self._values:
            self._left -= len(grammar)
            self._values[grammar] = f"value_{len(self._values)}"
        return self._values[grammar]

    def _parameters(self, tool: Tool, tags: Parameters) -> str:
        """Return the parameters in the schema's order; those not required are optional."""
        root = _own(tool)
        self._parts = {}
        properties = root.get("properties")
        known = properties if isinstance(properties, dict) else {}
        given = root.get("required")
        required = dict.fromkeys(key for key in _listed(given) if isinstance(key, str))
        before = self._lark(*tags.written[0])
        between = self._lark(*tags.written[1])
        found = []
        only_required = [key for key in required if key not in known]
        for key, schema in {**known, **dict.fromkeys(only_required, True)}.items():
            value = self._tagged(schema, root, tags, is_lenient=tool.lenient)
            mark = "" if key in required else "?"
            found.append(f"({before} {_quoted(key)} {between} {value}){mark}")
        others = [root.get(keyword) for keyword in _SAYING_MORE if keyword != "properties"]
        if any(others):
            value = self._tagged(True, root, tags, is_lenient=True)
            found.append(f"({before} KEY {between} {value}){{0,{_MAX_FREE_PARAMETERS}}}")
        return " ".join(found)

    def _tagged(
        self, schema: Any, root: Mapping[str, Any], tags: Parameters, *, is_lenient: bool
    ) -> str:
        """Return the grammar of one value and of the markup behind it."""
        end = self._lark(*tags.written[2])
        kind = kind_of(schema, root)
        if kind == "json":
            given = json.dumps(schema)
            if given not in self._parts:
                if self._left < 0:  # the grammar is refused as a whole, and definitions are large
                    return end
                part = json.dumps(_part(schema, root, is_lenient=is_lenient))
                self._parts[given] = self._value(f": %json {part}")
            return f"{self._parts[given]} {end}"
        choices = text_choices(schema)
        if choices:
            return f"({' | '.join(map(_quoted, choices))}) {end}"
        first, *others = tags.written[2]
        if not isinstance(first, str) or first in self._token_ids:
            value = self._value(": /(.|\\n)*/")
            return f"{value} {end}"
        value = self._value(f"[lazy]: /(.|\\n)*{_in_regex(first)}/")
        return f"{value} {self._lark(*others)}"


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_regex(text: str) -> str:
    return "".join(c if c.isalnum() or c in "<>=_ " else f"\\{c}" for c in text).replace(
        "\\\n", "\\n"
    )


def of_object(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of arguments, which are an object whatever else it allows."""
    return {**(parameters or {}), "type": "object"}


def _own(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments without annotations."""
    given: dict[str, Any] = without_annotations(of_object(tool.parameters))
    if len(json.dumps(given)) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"{tool.name}: parameters exceed {MAX_SOURCE_CHARACTERS} characters")
    return given


def _schema(tool: Tool) -> Any:
    given = _own(tool)
    if given.keys().isdisjoint(_SAYING_MORE):
        given["properties"] = {}  # an empty schema allows no arguments
    return ready(lenient(given) if tool.lenient else given)


def _part(schema: dict[str, Any], root: Mapping[str, Any], *, is_lenient: bool) -> Any:
    """Return the schema of one parameter with the definitions that it may refer to."""
    found = dict(schema)
    if '"$ref"' in json.dumps(schema):
        found.update({key: root[key] for key in _DEFINITIONS if key in root})
    return ready(lenient(found) if is_lenient else found)
