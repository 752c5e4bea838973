"""Tools for a model: how it is told of them, and the grammar of the calls that it may write.

A call is always the same text, whoever asked for it:

    <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>

Qwen, Hermes and their children learned it with line breaks inside the tags, and their chat
templates list the tools themselves. For every other model Baton writes the list into the system
message. ``baton/text/tool_calls.py`` reads calls back out of an answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic_core import from_json

from baton.text.grammar import MAX_SOURCE_CHARACTERS
from baton.text.json_schema import lenient, ready, without_annotations
from baton.types.errors import GrammarError

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
MAX_CALLS = 8
"""Calls in one answer where the client demands some: a weak model would never stop."""

_PROMPT = """\
You can call these functions, described as JSON:
{tools}
To call one, write nothing but its name and its arguments as JSON, like this:
{example}
The result comes back in <tool_response></tool_response>. Otherwise answer with text."""

_SAYING_MORE = (
    *("properties", "patternProperties", "additionalProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf"),
)

Choice = Literal["auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the client offers.

    Attributes:
        name: Letters, digits, ``_`` and ``-``.
        parameters: JSON schema of the arguments, an object.
        lenient: Keywords that no grammar can follow are left aside.
    """

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    lenient: bool = False

    def described(self) -> dict[str, Any]:
        """OpenAI's form, which chat templates know."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """A family of models.

    Attributes:
        gap: What stands between a tag and the JSON inside, and between two calls.
        in_template: The chat template lists the tools and writes calls and results itself.
    """

    gap: str
    in_template: bool

    def call(self, name: str, arguments: str) -> str:
        """The text of one call; ``arguments`` is JSON already."""
        inside = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return f"{OPEN_TAG}{self.gap}{inside}{self.gap}{CLOSE_TAG}"


TEMPLATE = ToolSyntax("\n", in_template=True)
PROMPTED = ToolSyntax("", in_template=False)


def syntax_of(template: str | None) -> ToolSyntax:
    """The family of a chat template.

    One that knows tools but writes calls otherwise counts as one that does not know them.
    """
    knows = template is not None and "tools" in template and OPEN_TAG in template
    return TEMPLATE if knows else PROMPTED


# --- what the model reads ----------------------------------------------------------------------


def conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], syntax: ToolSyntax
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools as the chat template gets them.

    Args:
        messages: With ``role`` and ``content``; a call of the assistant is an entry
            ``{"id", "name", "arguments"}`` of ``tool_calls``, arguments as JSON text; a result has
            the role ``tool``, and perhaps the ``name`` of its tool.
        tools: What may be called; empty for none.
        syntax: Of the template.
    """
    if syntax.in_template:
        return [_for_template(message) for message in messages], [t.described() for t in tools]
    plain: list[dict[str, Any]] = []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>{text}</tool_response>"
            if plain and plain[-1].get("results"):  # several results are one turn
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text, "results": True})
            continue
        calls = [syntax.call(call["name"], call["arguments"]) for call in _calls(message)]
        text = "\n".join(part for part in (text, *calls) if part)
        more = {key: message[key] for key in ("name", "reasoning_content") if key in message}
        plain.append({"role": message["role"], "content": text, **more})
    if tools:
        _add_prompt(plain, tools, syntax)
    return [{k: v for k, v in m.items() if k != "results"} for m in plain], []


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = ("role", "content", "tool_call_id", "name", "reasoning_content")
    found = {key: message[key] for key in plain if key in message}
    if calls := _calls(message):
        found["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": _arguments(call["arguments"])},
            }
            for call in calls
        ]
    return found


def _arguments(text: str) -> Any:
    """Arguments for a template, which writes them anew: an object, or the text as it stands.

    A call that was cut short has no object; some texts are JSON that no template could write.
    """
    try:
        from_json(text, allow_inf_nan=False)
        arguments = json.loads(text)
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


def _add_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool], syntax: ToolSyntax) -> None:
    listed = "\n".join(json.dumps(t.described()["function"], ensure_ascii=False) for t in tools)
    example = syntax.call("function-name", '{"argument": "value"}')
    prompt = _PROMPT.format(tools=listed, example=example)
    if messages and messages[0]["role"] in ("system", "developer"):
        prompt = f"{messages.pop(0)['content']}\n\n{prompt}"
    messages.insert(0, {"role": "system", "content": prompt})


# --- what the model may write -------------------------------------------------------------------


def calls_grammar(tools: Sequence[Tool], choice: Choice, *, parallel: bool) -> str:
    """A Lark grammar for answers with calls.

    Args:
        tools: What may be called, at least one.
        choice: ``auto``: text, in which a call that was begun is completed; ``required``: calls.
            Where something else may stand in place of calls, ``required`` describes the calls.
        parallel: Several calls in one answer.

    Raises:
        GrammarError: A schema cannot be followed.
    """
    if choice == "required":
        more = f" (gap call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules = [f"start: call{more}", f'call: "{OPEN_TAG}" inside']
    else:
        # Lazy: as soon as the tag is complete, it is a tag and no text any more.
        rules = [
            "start: call* TEXT" if parallel else "start: TEXT | call",
            "TEXT: /(.|\\n)*/",
            f'head[lazy]: TEXT "{OPEN_TAG}"',
            "call: head inside",
        ]
    heads = [json.dumps(f'{tool.name}", "arguments": ') for tool in tools]
    functions = " | ".join(f'{head} arguments_{i} "}}"' for i, head in enumerate(heads))
    rules += [
        f'inside: gap "{{\\"name\\": \\"" function gap "{CLOSE_TAG}"',
        "gap: /\\n?/",
        f"function: {functions}",
    ]
    rules += [
        f"arguments_{index}: %json {json.dumps(_schema(tool))}" for index, tool in enumerate(tools)
    ]
    return "\n".join(rules)


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments."""
    given = without_annotations({"type": "object", **(tool.parameters or {})})
    if len(json.dumps(given)) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"{tool.name}: over {MAX_SOURCE_CHARACTERS} characters of parameters")
    if given.keys().isdisjoint(_SAYING_MORE):
        given["properties"] = {}  # no arguments: it does not mean any argument
    if tool.lenient:
        given = lenient(given)
    return cast(dict[str, Any], ready(given))
