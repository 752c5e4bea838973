"""Bodies of real length: many tools, long tools, conversations, schemas and responses.

Each is a chat; `responses_of` and `messages_of` convert it for the two other APIs. Schemas have
only lists of values, so a response of any model that follows them ends.
"""

from collections.abc import Mapping
from typing import Any

TOOLS_BYTES = 150_000
MANY_TOOLS = 200
MESSAGES = 1_000
ANSWER_TOKENS = 8_000
SCHEMA_BYTES = 50_000
_LONG_TOOLS = 40
_VALUES = 10  # values of a field of the schema, as a multiple of the number of words
_WORDS = (
    *("the", "fleet", "moves", "what", "a", "prompt", "has", "become", "to", "one"),
    *("worker", "that", "writes", "its", "answer"),
)
_CALL_TOKENS = 2_000  # a call or an object of lists is shorter

Body = dict[str, Any]


def prose(characters: int, salt: int) -> str:
    """Return plain words, different for each salt."""
    words: list[str] = []
    length = 0
    place = salt
    while length < characters:
        word = f"{_WORDS[place % len(_WORDS)]}{place % 97}"
        words.append(word)
        length += len(word) + 1
        place = place * 5 + 3
        place %= 1_000_003
    return " ".join(words)[:characters]


def schema_of(size: int, salt: int = 0) -> Body:
    """Return the schema of an object of lists of values, of about ``size`` bytes as JSON."""
    properties: dict[str, Body] = {}
    length = 0
    while length < size:
        number = len(properties)
        values = [f"{word}-{number}-{salt}-{i}" for i, word in enumerate(_WORDS * _VALUES)]
        described = {"type": "string", "enum": values, "description": prose(600, number + salt)}
        properties[f"field_{number}"] = described
        length += sum(map(len, values)) + 4 * len(values) + 660
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def tool(number: int, size: int) -> Body:
    """Return a function of about ``size`` bytes: half description, half parameters."""
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["hour", "day", "week"]},
            "detailed": {"type": "boolean", "description": prose(size // 2, number + 7)},
        },
        "required": ["unit", "detailed"],
        "additionalProperties": False,
    }
    described = prose(size // 2, number)
    return {"name": f"look_up_{number}", "description": described, "parameters": parameters}


def tools_of(count: int, size: int) -> list[Body]:
    """Return so many functions of ``size`` bytes in all."""
    return [
        {"type": "function", "function": tool(number, size // count)} for number in range(count)
    ]


def conversation(count: int) -> list[Body]:
    """Return so many messages of user and assistant in turns; the last is the user's."""
    roles = ("user", "assistant")
    return [
        {"role": roles[(count - 1 - number) % 2], "content": prose(120, number)}
        for number in range(count)
    ]


def _chat(messages: list[Body], **fields: object) -> Body:
    return {"model": "default", "temperature": 0, "seed": 1, "messages": messages, **fields}


def _shaped(schema: Body) -> Body:
    named = {"name": "report", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def bodies() -> Mapping[str, Body]:
    """Return all bodies, as chats."""
    question = conversation(1)
    called = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": _CALL_TOKENS}
    schema = schema_of(SCHEMA_BYTES)
    strict = {
        "name": "file_report",
        "description": prose(200, 5),
        "strict": True,
        "parameters": schema,
    }
    return {
        "short": _chat(question, max_tokens=16),
        "150 KB of tools": _chat(question, tools=tools_of(_LONG_TOOLS, TOOLS_BYTES), **called),
        "200 tools": _chat(question, tools=tools_of(MANY_TOOLS, 60_000), **called),
        "1,000 messages": _chat(conversation(MESSAGES), max_tokens=16),
        "answer of 8,000 tokens": _chat(question, max_tokens=ANSWER_TOKENS, ignore_eos=True),
        "schema of 50 KB": _chat(
            question, response_format=_shaped(schema), max_tokens=_CALL_TOKENS
        ),
        "strict tool of 50 KB": _chat(
            question, tools=[{"type": "function", "function": strict}], **called
        ),
        "all together": _chat(
            conversation(MESSAGES),
            tools=tools_of(MANY_TOOLS, TOOLS_BYTES),
            response_format=_shaped(schema),
            parallel_tool_calls=False,
            max_tokens=_CALL_TOKENS,
        ),
    }


def responses_of(chat: Body) -> Body:
    """Return the same request for ``POST /v1/responses``."""
    body: Body = {key: chat[key] for key in ("model", "temperature", "seed")}
    body["input"] = chat["messages"]
    body["max_output_tokens"] = chat["max_tokens"]
    body["store"] = False
    for key in ("tool_choice", "parallel_tool_calls", "stream", "ignore_eos"):
        if key in chat:
            body[key] = chat[key]
    if "tools" in chat:
        body["tools"] = [{"type": "function", **item["function"]} for item in chat["tools"]]
    if "response_format" in chat:
        named = chat["response_format"]["json_schema"]
        body["text"] = {"format": {"type": "json_schema", **named}}
    return body


def messages_of(chat: Body) -> Body:
    """Return the same request for ``POST /v1/messages``."""
    body: Body = {key: chat[key] for key in ("model", "temperature", "messages", "max_tokens")}
    if "stream" in chat:
        body["stream"] = chat["stream"]
    if "tools" in chat:
        body["tools"] = [_anthropic_tool(item["function"]) for item in chat["tools"]]
        kind = "any" if chat.get("tool_choice") == "required" else "auto"
        body["tool_choice"] = {"type": kind, "disable_parallel_tool_use": True}
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def _anthropic_tool(function: Body) -> Body:
    named: Body = {key: function[key] for key in ("name", "description")}
    return named | {"input_schema": function["parameters"]}
