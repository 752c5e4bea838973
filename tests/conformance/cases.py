"""Requests whose answers are judged: the forms that the answers of each endpoint have."""

from typing import Any, NamedTuple

CHAT = "POST /v1/chat/completions"
COMPLETIONS = "POST /v1/completions"
EMBEDDINGS = "POST /v1/embeddings"
RESPONSES = "POST /v1/responses"
RESPONSE = "GET /v1/responses/{response_id}"
CANCEL = "POST /v1/responses/{response_id}/cancel"
ITEMS = "GET /v1/responses/{response_id}/input_items"
INPUT_TOKENS = "POST /v1/responses/input_tokens"
MESSAGES = "POST /v1/messages"
COUNT_TOKENS = "POST /v1/messages/count_tokens"
FILES = "POST /v1/files"
FILE = "GET /v1/files/{file_id}"
BATCHES = "POST /v1/batches"
BATCH = "GET /v1/batches/{batch_id}"

SENTENCE = "Paris is the capital of France."
WEATHER_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
_THOUGHT = "<think>Let me see</think>Paris"
_JSON = '{"city": "Paris"}'

HI = [{"role": "user", "content": "hi"}]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "weather", "description": "Of a city", "parameters": _SCHEMA, "strict": True}
_CHAT_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
TOOLS = {"tools": [{"type": "function", **_FUNCTION}]}
_MESSAGE_TOOLS = {"tools": [{"name": "weather", "input_schema": _SCHEMA}]}
_USAGE = {"stream_options": {"include_usage": True}}
_FORMAT = {"type": "json_schema", "name": "city", "schema": _SCHEMA, "strict": True}
_MESSAGE_FORMAT = {"type": "json_schema", "schema": _SCHEMA}
_CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}
_CUSTOM = {"type": "custom", "name": "shell", "description": "Runs it"}
_CHAT_CUSTOM = {"tools": [{"type": "custom", "custom": {"name": "shell"}}]}
_CUSTOM_CALL = '<tool_call>{"name": "shell", "arguments": {"input": "ls -l\\n"}}</tool_call>'
_NAMESPACE = {
    "type": "namespace",
    "name": "sky",
    "description": "Of the sky",
    "tools": [{"type": "function", **_FUNCTION}],
}
_NAMESPACE_CALL = WEATHER_CALL.replace("weather", "sky.weather")
_EDITS = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


class Case(NamedTuple):
    """Form of an answer: what the model writes, and what the request asks for."""

    name: str
    writes: str
    body: dict[str, Any]


_ALLOWED = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [{"type": "function", "name": "weather"}],
}

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 100},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 100},
    RESPONSES: {"input": "hi", "max_output_tokens": 100},
    MESSAGES: {"messages": HI, "max_tokens": 100},
}

CASES: dict[str, tuple[Case, ...]] = {
    CHAT: (
        Case("text", SENTENCE, {}),
        Case("usage", SENTENCE, _USAGE),
        Case("a call", WEATHER_CALL, _CHAT_TOOLS),
        Case("text and two calls", f"So: {WEATHER_CALL}{WEATHER_CALL}", _CHAT_TOOLS),
        Case("a custom call", _CUSTOM_CALL, _CHAT_CUSTOM),
        Case("a function of the old API", WEATHER_CALL, {"functions": [_FUNCTION]}),
        Case("thinking", _THOUGHT, {}),
        Case("thinking and a call", f"<think>Hm</think>{WEATHER_CALL}", _CHAT_TOOLS),
        Case("logprobs", SENTENCE, {"logprobs": True, "top_logprobs": 2}),
        Case("a schema", _JSON, {"response_format": _CHAT_FORMAT}),
        Case("two choices", SENTENCE, {"n": 2}),
        Case("cut", SENTENCE, {"max_tokens": 2}),
        Case("a stop text", SENTENCE, {"stop": ["capital"]}),
    ),
    COMPLETIONS: (
        Case("text", SENTENCE, {}),
        Case("usage", SENTENCE, _USAGE),
        Case("logprobs", SENTENCE, {"logprobs": 2}),
        Case("two choices", SENTENCE, {"n": 2}),
        Case("two prompts", SENTENCE, {"prompt": ["hi", "you"]}),
        Case("echo", SENTENCE, {"echo": True, "logprobs": 1}),
        Case("cut", SENTENCE, {"max_tokens": 2}),
        Case("a stop text", SENTENCE, {"stop": ["capital"]}),
    ),
    RESPONSES: (
        Case("a custom call", _CUSTOM_CALL, {"tools": [_CUSTOM]}),
        Case("a call in a namespace", _NAMESPACE_CALL, {"tools": [_NAMESPACE]}),
        Case("text", SENTENCE, {}),
        Case("not stored", SENTENCE, {"store": False}),
        Case(
            "all fields of a request",
            SENTENCE,
            {
                "instructions": "Be brief",
                "metadata": {"a": "b"},
                "reasoning": {"effort": "low", "summary": "auto"},
                "temperature": 0.5,
                "top_p": 0.9,
                "truncation": "auto",
                "user": "u",
                "prompt_cache_key": "k",
                "safety_identifier": "s",
                "max_tool_calls": 3,
                "parallel_tool_calls": False,
                "tool_choice": "none",
                **TOOLS,
            },
        ),
        Case("a call", WEATHER_CALL, {**TOOLS, "tool_choice": "required"}),
        Case(
            "a named call",
            WEATHER_CALL,
            {**TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
        ),
        Case(
            "text and two calls",
            f"So: {WEATHER_CALL}{WEATHER_CALL}",
            {**TOOLS, "tool_choice": _ALLOWED},
        ),
        Case("thinking", _THOUGHT, {}),
        Case("thinking and a call", f"<think>Hm</think>{WEATHER_CALL}", TOOLS),
        Case(
            "logprobs",
            SENTENCE,
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        ),
        Case("a schema", _JSON, {"text": {"format": _FORMAT, "verbosity": "low"}}),
        Case("cut", SENTENCE, {"max_output_tokens": 2}),
        Case("a cut call", WEATHER_CALL, {"max_output_tokens": 16, **TOOLS}),
    ),
    MESSAGES: (
        Case("edits", SENTENCE, _EDITS),
        Case("text", SENTENCE, {}),
        Case("a call", WEATHER_CALL, {**_MESSAGE_TOOLS, "tool_choice": {"type": "any"}}),
        Case("text and two calls", f"So: {WEATHER_CALL}{WEATHER_CALL}", _MESSAGE_TOOLS),
        Case("thinking", _THOUGHT, {"thinking": {"type": "adaptive"}}),
        Case("thinking and a call", f"<think>Hm</think>{WEATHER_CALL}", _MESSAGE_TOOLS),
        Case("a schema", _JSON, {"output_config": {"format": _MESSAGE_FORMAT}}),
        Case("cut", SENTENCE, {"max_tokens": 2}),
        Case("a cut call", WEATHER_CALL, {"max_tokens": 16, **_MESSAGE_TOOLS}),
        Case("a stop text", SENTENCE, {"stop_sequences": ["capital"]}),
    ),
}

# Valid bodies of calls that answer in one piece only.
WHOLE: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": ["hi", "you"]},
    INPUT_TOKENS: {"input": "hi"},
    COUNT_TOKENS: {"messages": HI},
}
