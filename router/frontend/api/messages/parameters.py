"""The fields of Anthropic's Messages API; a part of ``docs/parameters.md`` is written from them."""

from router.frontend.api.bodies.fields import MAX_TOOLS, Fields, Refused

_CACHED = "prefixes are found without a mark"
_HINT = "a hint about speed or place; every request is served alike"
_NO_TEXT = "of images and documents, which are refused where they stand"
_THEIRS = "offer tools of your own, with input_schema"

COUNT_TOKENS = Fields(
    title="`POST /v1/messages/count_tokens`",
    honoured={
        "model": "left out: the model that the fleet serves",
        "messages": "turns of one side that follow each other are joined; an assistant's last "
        "one is gone on with",
        "system": "text, or blocks of text",
        "tools": f"up to {MAX_TOOLS}",
        "tool_choice": "see below",
        "thinking": "see below",
        "output_config": "see below",
    },
    accepted={
        "cache_control": _CACHED,
        "service_tier": _HINT,
        "speed": _HINT,
        "inference_geo": _HINT,
        "billing_policy": _HINT,
        "fallbacks": "nothing is declined",
        "fallback_credit_token": "nothing is declined",
        "diagnostics": "GET /fleet/requests/{id} tells more",
        "user_profile_id": "nothing is kept under it",
        "workspace_id": "nothing is kept under it",
    },
    refused={
        "container": Refused((None,), _THEIRS),
        "mcp_servers": Refused((None, []), _THEIRS),
        "compaction": Refused((None,), "ask for a summary in a message"),
        "context_management": Refused(
            (None, {}, {"edits": []}), "send the messages that are to be read"
        ),
    },
)

MESSAGES = COUNT_TOKENS | Fields(
    title="`POST /v1/messages`",
    honoured={
        "max_tokens": "may be beyond the context, which then is the limit",
        "stop_sequences": "up to 16",
        "stream": "server-sent events",
        "temperature": "0 is greedy",
        "top_p": "over 0, at most 1",
        "top_k": "0 is off",
        "metadata": "see below",
        "thread": "400 `thread_unsupported_request`: clients then send the whole conversation",
        "priority": "Baton's own: lower goes first",
        "cache_salt": "Baton's own: shares a cached prefix only with the same salt",
    },
)

MESSAGE = Fields(
    title="a message of `/v1/messages`",
    honoured={"role": "user, assistant, system", "content": "text, or blocks"},
    accepted={
        "id": "messages have no names here",
        "type": "every item is a message",
        "model": "who wrote it does not matter",
        "stop_reason": "no part of the text",
        "stop_sequence": "no part of the text",
        "usage": "no part of the text",
    },
)

BLOCK = Fields(
    title="a content block",
    honoured={
        "type": "text, tool_use, tool_result, thinking, redacted_thinking (which nobody can read)",
        "text": "of a text",
        "thinking": "given to a template that shows earlier reasoning",
        "id": "of a call",
        "name": "of a call",
        "input": "of a call",
        "tool_use_id": "of a result",
        "content": "of a result: text, or blocks of text",
        "is_error": "the result begins with `Error: `",
    },
    accepted={
        "cache_control": _CACHED,
        "citations": "no part of the text",
        "signature": "no part of the text",
        "data": "of redacted thinking",
        "source": _NO_TEXT,
        "title": _NO_TEXT,
        "context": _NO_TEXT,
        "file_id": _NO_TEXT,
        "caller": "no part of the call",
        "toolset_name": "no part of the call",
    },
)

TOOL = Fields(
    title="a tool of `/v1/messages`",
    honoured={
        "type": "custom",
        "name": "letters, digits and `_-.:/`",
        "description": "shown to the model",
        "input_schema": "JSON schema of an object; calls keep to it",
        "strict": "false: keywords that cannot be enforced are checked afterwards",
    },
    accepted={
        "cache_control": _CACHED,
        "eager_input_streaming": "arguments are streamed as they are written",
        "input_examples": "not shown to the model",
        "allowed_callers": "only the model calls",
        "defer_loading": "every tool is told at once",
    },
)

TOOL_CHOICE = Fields(
    title="`tool_choice` of `/v1/messages`",
    honoured={
        "type": "auto, any, tool, none",
        "name": "with tool",
        "disable_parallel_tool_use": "one call at most",
    },
)

METADATA = Fields(
    title="`metadata` of `/v1/messages`",
    honoured={"user_id": "stands in traces and in the request's story"},
)

OUTPUT_CONFIG = Fields(
    title="`output_config`",
    honoured={"format": "a JSON schema", "effort": "given to a template that knows it"},
    accepted={"task_budget": "a hint to the model, which no template knows"},
)

OUTPUT_FORMAT = Fields(
    title="`output_config.format`",
    honoured={"type": "json_schema", "schema": "the answer keeps to it"},
)

THINKING = Fields(
    title="`thinking`",
    honoured={
        "type": "disabled, or any other; of a model that does not think it changes nothing",
        "budget_tokens": "tokens after which thinking is closed",
        "display": "omitted leaves the thinking out of the answer",
    },
)

TABLE = (
    MESSAGES,
    COUNT_TOKENS,
    MESSAGE,
    BLOCK,
    TOOL,
    TOOL_CHOICE,
    METADATA,
    OUTPUT_CONFIG,
    OUTPUT_FORMAT,
    THINKING,
)
