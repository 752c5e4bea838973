"""Tools of a request: the call syntax of a model, and how the model learns of tools.

Chat templates of many families list the tools and format calls and results. For other models Baton
writes the list into the system message, and they write calls like Hermes:

    <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>

``baton/text/calls`` describes the formats. ``baton/text/tool_calls.py`` extracts calls from a
response.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from baton.text.calls.formats import HERMES, CallFormat, Parts, format_of
from baton.text.calls.forms import MessageForms, forms_of, with_reasoning
from baton.text.calls.values import Kind, kinds_of
from baton.text.template import ChatTemplate, Rendering
from baton.text.tokenizer import TextTokenizer

_PROMPT = """\
You can call these functions, described as JSON:
{tools}
To call one, write nothing but its name and its arguments as JSON, like this:
{example}
"""
_RESULTS = "The result comes back in <tool_response></tool_response>. "
_OTHERWISE = "Otherwise answer with text."
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SHORT_ID_CHARACTERS = 9
_PROBED = Rendering(begin_answer=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Function that the client offers.

    Attributes:
        name: Letters, digits, ``_``, ``-``, ``.``, ``:`` and ``/``.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToolSyntax:
    """Tool-call syntax of a model; hashed by identity, since there is one per model.

    Attributes:
        format: Format of calls.
        forms: Forms in which the chat template takes calls; None if it takes none.
        token_ids: Ids of tags that are special tokens, which text cannot spell.
    """

    format: CallFormat
    forms: MessageForms | None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: str | None, tokenizer: TextTokenizer | None = None) -> "ToolSyntax":
        """Return the syntax for a chat template and a vocabulary.

        Templates with an unknown format, or that do not render calls, are treated like templates
        without tools.
        """
        found = format_of(template) if template is not None else None
        forms = None if found is None else _forms_of(template, found)
        if found is None or forms is None:
            return PROMPTED
        return cls(format=found, forms=forms, token_ids=_special_ids(found.tags, tokenizer))

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens that the parser needs in the text."""
        return frozenset(self.token_ids.values())

    def expected(self, tools: Iterable[Tool], *, only: bool = False) -> "ExpectedCalls":
        """Return what the parser of a response needs, if the model may, or must, call ``tools``."""
        schemas = {tool.name: tool.parameters for tool in tools}
        tagged = self.format.parameters is not None
        kinds = {name: kinds_of(schema) for name, schema in schemas.items()} if tagged else {}
        return ExpectedCalls(
            format=self.format,
            names=frozenset(schemas),
            kinds=kinds,
            special_ids=self.special_ids,
            only=only,
        )

    def call(self, name: str, arguments: str) -> str:
        """Return the text of one call; ``arguments`` is JSON text."""
        written = self.format.written
        texts = map(_text, (written.first + written.begin, written.middle, written.end))
        begin, middle, end = texts
        return f"{begin}{name}{middle}{arguments}{end}{_text(written.last)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCalls:
    """Calls that a response may contain.

    Attributes:
        names: Names of the tools that the model may call.
        kinds: Kinds of parameters, by function and parameter, if they are written outside JSON.
        special_ids: Ids of special tokens that the parser needs in the text.
        only: Whether the response consists of calls.
    """

    format: CallFormat
    names: frozenset[str] = frozenset()
    kinds: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()
    only: bool = False


PROMPTED = ToolSyntax(format=HERMES, forms=None)


def _text(parts: Parts) -> str:
    """Return the fixed texts of parts, without optional white space."""
    return "".join(part for part in parts if isinstance(part, str))


def _forms_of(template: str | None, call_format: CallFormat) -> MessageForms | None:
    try:
        chat = ChatTemplate(template, {"bos_token": "", "eos_token": ""})
    except ValueError:  # reported where the template is loaded
        return None

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return chat.render(messages, tools=tools, rendering=_PROBED)

    return forms_of(render, call_format)


def _special_ids(tags: Sequence[str], tokenizer: TextTokenizer | None) -> dict[str, int]:
    if tokenizer is None:
        return {}
    ids = {tag: tokenizer.backend.token_to_id(tag) for tag in tags}
    return {tag: i for tag, i in ids.items() if i is not None and i in tokenizer.special_ids}


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
    if syntax.forms is None:
        return _prompted(messages, tools, syntax), []
    if syntax.format.single:
        messages = _one_call_each(messages)
    told = [part for message in messages for part in _for_template(message, syntax, syntax.forms)]
    if syntax.forms.lists_tools:
        return told, [_described(tool, syntax.format) for tool in tools]
    if tools:
        _add_to_system(told, _prompt(tools, syntax))
    return told, []


def _described(tool: Tool, call_format: CallFormat) -> dict[str, Any]:
    described = tool.described()
    if call_format.describes:
        described["function"].setdefault("description", "")
    return described


def _prompted(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], syntax: ToolSyntax
) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for message in messages:
        text = message["content"]
        role = message["role"]
        is_result = role == "tool"
        if is_result:
            text = f"<tool_response>{text}</tool_response>"
            role = "user"
        # Several results, and a question behind them, are one turn: some templates require it.
        if role == "user" and plain and plain[-1].get("results"):
            plain[-1]["content"] += f"\n{text}"
            plain[-1]["results"] = is_result
            continue
        calls = [syntax.call(call["name"], call["arguments"]) for call in _calls(message)]
        text = "\n".join(part for part in (text, *calls) if part)
        more = {key: message[key] for key in ("name", "reasoning_content") if key in message}
        if is_result:
            more = {"results": True}
        plain.append({"role": role, "content": text, **more})
    if tools:
        _add_to_system(plain, _prompt(tools, syntax))
    return [{k: v for k, v in m.items() if k != "results"} for m in plain]


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with one call per message, each followed by its results."""
    parts: list[Mapping[str, Any]] = []
    moved: set[int] = set()
    for index, message in enumerate(messages):
        calls = _calls(message)
        if len(calls) < 2:
            parts += [message] if index not in moved else []
            continue
        results = _results_behind(messages, index)
        for number, call in enumerate(calls):
            turn = {"role": "assistant", "content": ""} if number else message
            parts.append({**turn, "tool_calls": [call]})
            own = results.pop(call["id"], ())
            moved.update(own)
            parts += [messages[later] for later in own]
    return parts


def _results_behind(messages: Sequence[Mapping[str, Any]], index: int) -> dict[Any, list[int]]:
    """Return the indices of the results directly behind a message, by the id of their call."""
    found: dict[Any, list[int]] = {}
    for later in range(index + 1, len(messages)):
        if messages[later]["role"] != "tool":
            break
        found.setdefault(messages[later].get("tool_call_id"), []).append(later)
    return found


def _for_template(
    message: Mapping[str, Any], syntax: ToolSyntax, forms: MessageForms
) -> list[dict[str, Any]]:
    found = {key: message[key] for key in ("role", "content", "name") if key in message}
    thoughts = message.get("reasoning_content")
    calls = _calls(message)
    if "tool_call_id" in message:
        found["tool_call_id"] = _id(message["tool_call_id"], syntax.format)
    before: list[dict[str, Any]] = []
    if calls:
        found["tool_calls"] = [_called(call, syntax, forms) for call in calls]
        if syntax.format.in_channels and thoughts and found["content"]:
            # The template has one place for both.
            thoughts = f"{thoughts}\n\n{found['content']}"
            found["content"] = ""
        if forms.no_content:
            if found["content"]:
                before = [{"role": "assistant", "content": found["content"]}]
            found["content"] = None
    if thoughts:
        found = with_reasoning(found, thoughts, forms.reasoning)
    return [*before, found]


def _called(call: Mapping[str, Any], syntax: ToolSyntax, forms: MessageForms) -> dict[str, Any]:
    given: Any = call["arguments"]
    if not forms.arguments_as_text:
        given = _arguments(given)
        if syntax.format.parameters is not None and not isinstance(given, dict):
            given = {"arguments": given}  # a template that writes one tag per parameter
    return {
        "type": "function",
        "id": _id(call["id"], syntax.format),
        "function": {"name": call["name"], "arguments": given},
    }


def _id(given: str, call_format: CallFormat) -> str:
    if not call_format.short_ids or _SHORT_ID.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:_SHORT_ID_CHARACTERS]


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


def _prompt(tools: Sequence[Tool], syntax: ToolSyntax) -> str:
    functions = [tool.described()["function"] for tool in tools]
    if syntax.format.prompt and syntax.forms is not None:
        entries = [
            syntax.format.prompt_entry.format(
                name=function["name"],
                description=function.get("description", ""),
                parameters=json.dumps(function["parameters"], ensure_ascii=False),
            )
            for function in functions
        ]
        return syntax.format.prompt.replace("{tools}", "\n".join(entries))
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    example = syntax.call("function-name", '{"argument": "value"}')
    results = _RESULTS if syntax.forms is None else ""
    return _PROMPT.format(tools=listed, example=example) + results + _OTHERWISE


def _add_to_system(messages: list[dict[str, Any]], prompt: str) -> None:
    if messages and messages[0]["role"] in ("system", "developer"):
        prompt = f"{messages.pop(0)['content']}\n\n{prompt}"
    messages.insert(0, {"role": "system", "content": prompt})
