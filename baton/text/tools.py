"""Tools of a request: their description in the prompt, and the grammar of calls.

All models write calls in the same format:

    <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>

Qwen, Hermes and their descendants use line breaks inside the tags, and their chat templates list
the tools. For other models Baton writes the list into the system message.
``baton/text/tool_calls.py`` extracts calls from a response.
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
"""Limit of required calls in one response: a weak model would never stop."""

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
    """Function that the client offers.

    Attributes:
        name: Letters, digits, ``_`` and ``-``.
        lenient: Whether keywords that no grammar can enforce are ignored.
    """

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    lenient: bool = False

    def described(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, which chat templates use."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Tool-call syntax of a family of models.

    Attributes:
        gap: Text between a tag and the JSON inside, and between two calls.
        in_template: Whether the chat template lists the tools and formats calls and results.
    """

    gap: str
    in_template: bool

    def call(self, name: str, arguments: str) -> str:
        """Return the text of one call; ``arguments`` is JSON text."""
        inside = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return f"{OPEN_TAG}{self.gap}{inside}{self.gap}{CLOSE_TAG}"


TEMPLATE = ToolSyntax("\n", in_template=True)
PROMPTED = ToolSyntax("", in_template=False)


def syntax_of(template: str | None) -> ToolSyntax:
    """Return the syntax for a chat template.

    Templates that support tools with another call format are treated like templates without tools.
    """
    knows = template is not None and "tools" in template and OPEN_TAG in template
    return TEMPLATE if knows else PROMPTED


def conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], syntax: ToolSyntax
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools for the chat template.

    Args:
        messages: Messages with ``role`` and ``content``. A call of the assistant is an entry
            ``{"id", "name", "arguments"}`` of ``tool_calls``, arguments as JSON text; a result has
            the role ``tool`` and optionally the ``name`` of its tool.
        tools: Callable tools; empty for none.
        syntax: Syntax for the template.
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
    """Return the arguments as an object for a template, or as text if that is not possible.

    A truncated call has no object, and some JSON values cannot be written by templates.
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


def calls_grammar(tools: Sequence[Tool], choice: Choice, *, parallel: bool) -> str:
    """Return a Lark grammar of responses with calls.

    Args:
        tools: Callable tools, at least one.
        choice: ``auto``: text in which a started call is completed; ``required``: only calls.
        parallel: Whether a response may contain several calls.

    Raises:
        GrammarError: A schema cannot be enforced.
    """
    if choice == "required":
        more = f" (gap call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        rules = [f"start: call{more}", f'call: "{OPEN_TAG}" inside']
    else:
        # Lazy: a complete tag ends the text.
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
    given = without_annotations({"type": "object", **(tool.parameters or {})})
    if len(json.dumps(given)) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"{tool.name}: parameters exceed {MAX_SOURCE_CHARACTERS} characters")
    if given.keys().isdisjoint(_SAYING_MORE):
        given["properties"] = {}  # an empty schema allows no arguments
    if tool.lenient:
        given = lenient(given)
    return cast(dict[str, Any], ready(given))
