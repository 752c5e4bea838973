"""The fields of the Responses API; a part of ``docs/parameters.md`` is written from them."""

from router.frontend.api.bodies.fields import MAX_TOOLS, Fields, Refused

_HINT = "a hint about speed or price; every request is served alike"
_NO_TEXT = "of images and files, which are refused where they stand"
_ECHO = "repeated in the response"

INPUT_TOKENS = Fields(
    title="`POST /v1/responses/input_tokens`",
    honoured={
        "model": "left out: the model that the fleet serves",
        "input": "a text, or items",
        "instructions": "before all that was said",
        "previous_response_id": "its conversation stands before the input",
        "tools": f"up to {MAX_TOOLS}",
        "tool_choice": "none, auto, required, a function, allowed_tools",
        "parallel_tool_calls": "false: one call at most",
        "text": "see below",
        "reasoning": "see below",
        "truncation": "auto leaves the first turns out, as few as possible",
    },
    refused={
        "conversation": Refused((None,), "send previous_response_id, or all items as input"),
    },
)

RESPONSES = INPUT_TOKENS | Fields(
    title="`POST /v1/responses`",
    honoured={
        "max_output_tokens": "may be beyond the context, which then is the limit",
        "temperature": "0 is greedy",
        "top_p": "over 0, at most 1",
        "top_logprobs": "0 to 20",
        "include": "message.output_text.logprobs; other values change nothing",
        "stream": "server-sent events",
        "store": "false: the response is not kept",
        "metadata": _ECHO,
        "user": "stands in traces and in the request's story",
        "safety_identifier": _ECHO,
        "prompt_cache_key": _ECHO,
        "max_tool_calls": _ECHO,
        "priority": "Baton's own: lower goes first",
        "seed": "Baton's own: equal seeds give equal answers",
        "cache_salt": "Baton's own: shares a cached prefix only with the same salt",
    },
    accepted={
        "service_tier": _HINT,
        "prompt_cache_retention": "prefixes stay for as long as there is room",
        "prompt_cache_options": "prefixes are found without a key",
        "stream_options": "nothing is padded",
        "image": "of images, which are refused where they stand",
        "access_programs": "nothing depends on them",
        "background_options": "of responses in the background, which are refused",
    },
    refused={
        "background": Refused(
            (None, False),
            "a response lasts as long as its call, so that none outlives the router that has it: "
            "leave it out, and stream",
        ),
        "prompt": Refused((None,), "there are no prompt templates: send instructions and input"),
        "context_management": Refused((None, []), "use truncation: auto"),
        "moderation": Refused((None,), "ask a model that moderates"),
    },
)

ITEM = Fields(
    title="an item of `input`",
    honoured={
        "type": "message, function_call, function_call_output, item_reference, reasoning",
        "id": "of an item_reference: the item of a kept response",
        "role": "of a message: user, assistant, system, developer (as system)",
        "content": "of a message or of reasoning: text, or parts of text",
        "status": "kept with it",
        "call_id": "of a call and of its output",
        "name": "of a call",
        "arguments": "of a call",
        "output": "of a call: text, or parts of text",
        "summary": "of reasoning without content",
    },
    accepted={
        "phase": "no part of the text",
        "encrypted_content": "of reasoning, which nobody here can read",
        "caller": "no part of the call",
        "namespace": "no part of the call",
        "async": "no part of the call",
        "parsed_arguments": "the arguments, parsed by the client",
        "created_by": "no part of the text",
    },
)

PART = Fields(
    title="a part of an item's content",
    honoured={
        "type": "input_text, output_text, text, refusal, reasoning_text, summary_text",
        "text": "parts stand on lines of their own",
        "refusal": "as text",
    },
    accepted={
        "annotations": "no part of the text",
        "logprobs": "no part of the text",
        "parsed": "the text, parsed by the client",
        "prompt_cache_breakpoint": "prefixes are found without a mark",
        "image_url": _NO_TEXT,
        "detail": _NO_TEXT,
        "file_id": _NO_TEXT,
        "file_url": _NO_TEXT,
        "file_data": _NO_TEXT,
        "filename": _NO_TEXT,
        "input_audio": _NO_TEXT,
    },
)

FUNCTION = Fields(
    title="a tool of `/v1/responses`",
    honoured={
        "type": "function",
        "name": "letters, digits and `_-.:/`",
        "description": "shown to the model",
        "parameters": "JSON schema of an object; calls keep to it",
        "strict": "false: keywords that cannot be enforced are checked afterwards",
    },
    accepted={
        "allowed_callers": "only the model calls",
        "defer_loading": "every tool is told at once",
        "output_schema": "not shown to the model",
    },
)

FUNCTION_NAMED = Fields(
    title="a tool of `allowed_tools`", honoured={"type": "function", "name": "of a tool"}
)

TOOL_CHOICE = FUNCTION_NAMED | Fields(
    title="`tool_choice` of `/v1/responses`, where it is an object",
    honoured={
        "type": "function, allowed_tools",
        "mode": "of allowed_tools: auto, required",
        "tools": "of allowed_tools; the model is told of all",
    },
)

TEXT = Fields(
    title="`text`",
    honoured={"format": "see below", "verbosity": _ECHO},
)

TEXT_FORMAT = Fields(
    title="`text.format`",
    honoured={
        "type": "text, json_object, json_schema",
        "schema": "the answer keeps to it",
        "strict": "false: keywords that cannot be enforced are checked afterwards",
        "name": _ECHO,
        "description": _ECHO,
    },
)

REASONING = Fields(
    title="`reasoning`",
    honoured={
        "effort": "given to a template that knows it; none: enable_thinking false",
        "summary": _ECHO,
    },
    accepted={
        "generate_summary": "thinking is told as it is",
        "context": "a template says which earlier reasoning is read",
        "mode": _HINT,
    },
)

TABLE = (
    RESPONSES,
    INPUT_TOKENS,
    ITEM,
    PART,
    FUNCTION,
    TOOL_CHOICE,
    FUNCTION_NAMED,
    TEXT,
    TEXT_FORMAT,
    REASONING,
)
