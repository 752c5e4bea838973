"""OpenAI's old ``functions`` as tools. Results name a function instead of a call."""

from typing import Any

from baton.types.errors import InvalidRequestError


def translated(data: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's fields with tools instead of functions; ``functions`` itself is kept.

    Raises:
        InvalidRequestError: The body has both, or a result refers to no earlier call.
    """
    body = dict(data)
    if data.get("functions") and isinstance(data["functions"], list):
        if data.get("tools"):
            raise InvalidRequestError.at("functions", "cannot be combined with tools; use tools")
        body["tools"] = [{"type": "function", "function": f} for f in data["functions"]]
        body["parallel_tool_calls"] = False
        choice = data.get("function_call")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
        if choice is not None:
            body["tool_choice"] = choice
    messages = data.get("messages")
    if isinstance(messages, list) and any(map(_is_old, messages)):
        body["messages"] = _messages(messages)
    return body


def _is_old(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") == "function" or message.get("function_call") is not None
    )


def _messages(messages: list[Any]) -> list[Any]:
    ids: dict[str, str] = {}  # id of the last call by the function's name
    translated_messages = []
    for index, message in enumerate(messages):
        if not _is_old(message):
            translated_messages.append(message)
            continue
        fields = dict(message)
        call = fields.pop("function_call", None)
        if fields.get("role") == "function":
            name = fields.pop("name", None)
            if not isinstance(name, str) or name not in ids:
                raise InvalidRequestError.at(
                    f"messages[{index}].name", "must be the function of an earlier function_call"
                )
            fields |= {"role": "tool", "tool_call_id": ids[name]}
        if isinstance(call, dict):
            call_id = f"call_{index}"
            ids[str(call.get("name"))] = call_id
            fields["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
        translated_messages.append(fields)
    return translated_messages
