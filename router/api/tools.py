"""What a chat says about tools: what may be called, what must be, and what was called before."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from engine.core.errors import InvalidRequestError
from engine.text.tools import Tool, calls_grammar
from router.api.bodies.chat import ChatBody
from router.api.bodies.messages import Message
from router.api.bodies.tools import ToolChoice, ToolNamed, ToolOffered


def offered(listed: Sequence[ToolOffered] | None, choice: ToolChoice | None = None) -> list[Tool]:
    """The tools that the answer may call: of a named choice only that one, of ``none`` none.

    Raises:
        InvalidRequestError: The choice does not fit the tools.
    """
    tools = [
        Tool(
            name=item.function.name,
            description=item.function.description,
            parameters=item.function.parameters,
        )
        for item in listed or ()
    ]
    _check(tools)
    if choice == "none":
        return []
    if isinstance(choice, ToolNamed):
        named = [tool for tool in tools if tool.name == choice.function.name]
        if not named:
            raise InvalidRequestError(
                f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice"
            )
        return named
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice: needs tools", param="tool_choice")
    return tools


def _check(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidRequestError(
                f"tools[{index}]: there are two functions {tool.name!r}", param=f"tools[{index}]"
            )
        names.add(tool.name)
        if tool.parameters and tool.parameters.get("type", "object") != "object":
            where = f"tools[{index}].function.parameters"
            raise InvalidRequestError(
                f"{where}: must be the schema of an object, with type: object", param=where
            )


def calls_grammar_of(body: ChatBody, tools: Sequence[Tool]) -> str:
    """The grammar of an answer that may call ``tools``, which are not empty."""
    named = isinstance(body.tool_choice, ToolNamed)
    choice = body.tool_choice if not named else "required"
    parallel = body.parallel_tool_calls is not False and not named
    return calls_grammar(tools, "required" if choice == "required" else "auto", parallel=parallel)


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as ``engine.text.tools.conversation`` takes them.

    Raises:
        InvalidRequestError: Content is missing, or calls and results do not match.
    """
    called: set[str] = set()
    conversation = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        entry: dict[str, Any] = {"role": message.role, "content": message.text()}
        if message.tool_calls:
            if message.role != "assistant":
                raise _misplaced(f"{where}.tool_calls", "an assistant")
            entry["tool_calls"] = _calls(message, where)
            called |= {call.id for call in message.tool_calls}
        elif message.content is None:
            raise InvalidRequestError(f"{where}.content: is required", param=f"{where}.content")
        if message.role == "tool":
            if message.tool_call_id not in called:
                raise InvalidRequestError(
                    f"{where}.tool_call_id: must be the id of a call before it "
                    f"(got {message.tool_call_id!r:.80})",
                    param=f"{where}.tool_call_id",
                )
            entry["tool_call_id"] = message.tool_call_id
            if message.name is not None:
                entry["name"] = message.name
        elif message.tool_call_id is not None:
            raise _misplaced(f"{where}.tool_call_id", "a tool")
        elif message.name is not None:  # many templates would pass it over in silence
            raise _misplaced(f"{where}.name", "a tool")
        conversation.append(entry)
    return conversation


def _calls(message: Message, where: str) -> list[dict[str, str]]:
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        given = call.function
        try:
            # Templates write them anew: nothing too deep for that, no NaN, no half of a character.
            from_json(given.arguments, allow_inf_nan=False)
            is_object = isinstance(json.loads(given.arguments), dict)
        except ValueError:
            is_object = False
        if not is_object:
            param = f"{where}.tool_calls[{index}].function.arguments"
            raise InvalidRequestError(f"{param}: must be the JSON text of an object", param=param)
        calls.append({"id": call.id, "name": given.name, "arguments": given.arguments})
    return calls


def _misplaced(param: str, role: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: belongs into a message of {role}", param=param)
