"""Tools of the Responses API as tools of a chat, and the form of their calls in the response.

{"type": "function", "name": "f"}                     f       function_call
{"type": "custom", "name": "f"}                       f       custom_tool_call
{"type": "namespace", "name": "n", "tools": [{f}]}    n.f     function_call, namespace n
{"type": "web_search"} and others                     left out
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.fields import Ignored
from router.frontend.api.responses.body import ResponsesTool, ResponsesToolChoice

_KINDS = ("function", "custom")


class CallForm(NamedTuple):
    """Form of a tool's calls; ``namespace`` is empty for none."""

    name: str
    namespace: str
    custom: bool


class OfferedTool(NamedTuple):
    """A tool of the chat, its path in the body, and the form of its calls."""

    chat: dict[str, Any]
    place: str
    form: CallForm

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return joined(self.form.namespace, self.form.name)


def joined(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def offered_tools(
    listed: Sequence[ResponsesTool] | None, ignored: Ignored | None = None
) -> list[OfferedTool]:
    """Return the tools that a chat can offer; ``ignored`` collects the others.

    Raises:
        InvalidRequestError: A tool lacks a field.
    """
    ignored = Ignored() if ignored is None else ignored
    return list(_offered(listed or (), "tools", ResponsesTool(type="none"), ignored))


def _offered(
    listed: Sequence[ResponsesTool], where: str, inside: ResponsesTool, ignored: Ignored
) -> Iterator[OfferedTool]:
    for index, tool in enumerate(listed):
        place = f"{where}[{index}]"
        if tool.type == "namespace" and not inside.name:
            _named(tool, place)
            yield from _offered(tool.tools or (), f"{place}.tools", tool, ignored)
        elif tool.type in _KINDS:
            form = CallForm(_named(tool, place), inside.name or "", tool.type == "custom")
            yield OfferedTool(_chat_tool(tool, inside, place), place, form)
        else:
            ignored.leave_out(tool.name or tool.type, "tools[]")


def _named(tool: ResponsesTool, place: str) -> str:
    if tool.name is None:
        raise InvalidRequestError.at(f"{place}.name", "is required")
    return tool.name


def _chat_tool(tool: ResponsesTool, inside: ResponsesTool, place: str) -> dict[str, Any]:
    texts = [text for text in (inside.description, tool.description) if text]
    given: dict[str, Any] = {"name": joined(inside.name, tool.name or "")}
    if texts:
        given["description"] = "\n".join(texts)
    if tool.type == "custom":
        if tool.format is not None:
            given["format"] = _format(tool, place)
        return {"type": "custom", "custom": given}
    if tool.parameters is not None:
        given["parameters"] = tool.parameters
    if tool.strict is not None:
        given["strict"] = tool.strict
    return {"type": "function", "function": given}


def _format(tool: ResponsesTool, place: str) -> dict[str, Any]:
    given = tool.format
    if given is None or given.type == "text":
        return {"type": "text"}
    if given.syntax is None or given.definition is None:
        missing = "syntax" if given.syntax is None else "definition"
        raise InvalidRequestError.at(f"{place}.format.{missing}", "is required for this type")
    grammar = {"syntax": given.syntax, "definition": given.definition}
    return {"type": "grammar", "grammar": grammar}


def choice_of(choice: str | ResponsesToolChoice) -> str | dict[str, Any]:
    """Return the choice among the tools of the chat.

    Raises:
        InvalidRequestError: The chosen tool has no name, or a type that is not offered.
    """
    if isinstance(choice, str):
        return choice
    if choice.type in _KINDS:
        if choice.name is None:
            raise InvalidRequestError.at("tool_choice.name", "is required")
        return {"type": choice.type, choice.type: {"name": choice.name}}
    if choice.type == "allowed_tools":
        tools = [
            {"type": tool.type, tool.type: {"name": tool.name}}
            for tool in choice.tools or ()
            if tool.type in _KINDS and tool.name
        ]
        if not tools:
            raise InvalidRequestError.at("tool_choice.tools", "must name a function or custom tool")
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode or "auto", "tools": tools},
        }
    raise InvalidRequestError.at(
        "tool_choice.type",
        f"{choice.type[:64]!r} is not supported; use function, custom or allowed_tools",
    )
