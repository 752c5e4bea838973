"""Bodies of real length: many tools, long tools, long conversations, long schemas, long answers.

Each is a chat; `responses_of` and `messages_of` say the same to the two other APIs. Schemas have
lists of values only, so that an answer of any model that follows them ends.
"""

from collections.abc import Mapping
from typing import Any

TOOLS_BYTES = 150_000
MANY_TOOLS = 200
MESSAGES = 1_000
ANSWER_TOKENS = 8_000
SCHEMA_BYTES = 50_000
_LONG_TOOLS = 40
_VALUES = 10  # times the number of words: of one field of the schema
_WORDS = (
    *("the", "fleet", "moves", "what", "a", "prompt", "has", "become", "to", "one"),
    *("worker", "that", "writes", "its", "answer"),
)
_CALL_TOKENS = 2_000  # a call or an object of lists ends sooner

Body = dict[str, Any]


def prose(characters: int, salt: int) -> str:
    """Plain words, others for each salt."""
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
    """The schema of an object of lists of values, of about ``size`` bytes as JSON."""
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
    """A function of about ``size`` bytes as JSON: half its description, half its parameters."""
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
    """So many functions of ``size`` bytes in all."""
    return [
        {"type": "function", "function": tool(number, size // count)} for number in range(count)
    ]


def conversation(count: int) -> list[Body]:
    """So many messages, of user and assistant in turns; the last is the user's."""
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
    """All of them, as chats."""
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
    """The same for ``POST /v1/responses``."""
    told: Body = {key: chat[key] for key in ("model", "temperature", "seed")}
    told["input"] = chat["messages"]
    told["max_output_tokens"] = chat["max_tokens"]
    told["store"] = False
    for key in ("tool_choice", "parallel_tool_calls", "stream", "ignore_eos"):
        if key in chat:
            told[key] = chat[key]
    if "tools" in chat:
        told["tools"] = [{"type": "function", **item["function"]} for item in chat["tools"]]
    if "response_format" in chat:
        named = chat["response_format"]["json_schema"]
        told["text"] = {"format": {"type": "json_schema", **named}}
    return told


def messages_of(chat: Body) -> Body:
    """The same for ``POST /v1/messages``."""
    told: Body = {key: chat[key] for key in ("model", "temperature", "messages", "max_tokens")}
    if "stream" in chat:
        told["stream"] = chat["stream"]
    if "tools" in chat:
        told["tools"] = [_anthropic_tool(item["function"]) for item in chat["tools"]]
        kind = "any" if chat.get("tool_choice") == "required" else "auto"
        told["tool_choice"] = {"type": kind, "disable_parallel_tool_use": True}
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        told["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return told


def _anthropic_tool(function: Body) -> Body:
    told: Body = {key: function[key] for key in ("name", "description")}
    return told | {"input_schema": function["parameters"]}
