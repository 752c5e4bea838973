"""The table of all fields; ``python -m tests.router.api.parameters_page`` writes the docs of it."""

from router.frontend.api.bodies.fields import MAX_TOOLS, Fields, Refused

_BEAMS = Refused(
    (None, False),
    "there is no beam search, and no choosing the best of more answers than are sent: ask for n "
    "answers (n, temperature, seed) and choose among them by their logprobs",
)
_TEXT_ONLY = "this model reads and writes text only"
_HINT = "a hint about speed or price; every request is served alike"
_KEPT = "nothing is kept under it"

GENERATION = Fields(
    title="chat and completions",
    honoured={
        "model": "left out: the model that the fleet serves",
        "max_tokens": "chat: what the context leaves; completions: 16",
        "temperature": "0 is greedy; no upper limit but that of the number",
        "top_p": "over 0, at most 1",
        "top_k": "-1 and 0 are off",
        "min_p": "0 to 1",
        "seed": "equal seeds give equal answers",
        "stop": "a string or up to 16",
        "stop_token_ids": "up to 64",
        "include_stop_str_in_output": "the text ends with what ended it",
        "skip_special_tokens": "false shows them",
        "bad_words": "up to 64; never written, be it at the start of a word or within one",
        "n": "up to what one worker runs at once",
        "logit_bias": "-100 to 100 by token id",
        "presence_penalty": "-2 to 2",
        "frequency_penalty": "-2 to 2",
        "repetition_penalty": "0.01 to 100",
        "ignore_eos": "go on to max_tokens",
        "min_tokens": "no end before",
        "stream": "server-sent events",
        "stream_options": "only with stream",
        "user": "stands in traces and in the request's story",
        "priority": "lower goes first",
        "prompt_logprobs": "0 to 20 alternatives",
        "return_token_ids": "prompt_token_ids and token_ids beside the text",
        "truncate_prompt_tokens": "keep the last so many tokens; -1: what leaves room",
        "add_special_tokens": "whether the tokenizer adds its own; chat: false, completions: true",
        "cache_salt": "shares a cached prefix only with the same salt",
        "response_format": "JSON, of any shape or of a schema",
        "structured_outputs": "JSON schema, regex, choice or grammar",
        "guided_json": "as structured_outputs.json",
        "guided_regex": "as structured_outputs.regex",
        "guided_choice": "as structured_outputs.choice",
        "guided_grammar": "as structured_outputs.grammar",
    },
    accepted={
        "metadata": _KEPT,
        "store": _KEPT,
        "prompt_cache_key": "prefixes are found without a key",
        "prompt_cache_retention": "prefixes stay for as long as there is room",
        "service_tier": _HINT,
        "safety_identifier": "nothing is reported to anybody",
        "prediction": _HINT,
        "guided_decoding_backend": "there is one",
        "request_id": "the header X-Request-Id names a call",
        "spaces_between_special_tokens": "no spaces are put between them",
        "mm_processor_kwargs": "of images, which are refused where they stand",
        "media_io_kwargs": "of images, which are refused where they stand",
    },
    refused={
        "use_beam_search": _BEAMS,
        "num_beams": Refused((None, 1), _BEAMS.instead),
        "length_penalty": Refused((None, 1), _BEAMS.instead),
        "early_stopping": _BEAMS,
        "best_of": Refused((None, 1), _BEAMS.instead),  # and as many as n: see parse.py
        "allowed_token_ids": Refused((None, []), "use guided_choice or guided_regex"),
        "logits_processors": Refused((None, []), "use logit_bias or a grammar"),
        "guided_whitespace_pattern": Refused(
            (None,), "write x-guidance: {whitespace_pattern: ...} into the schema"
        ),
        "guided_json_object": Refused((None, False), "use response_format"),
        "return_tokens_as_token_ids": Refused((None, False), "use return_token_ids"),
        "logprob_token_ids": Refused((None, []), "use top_logprobs"),
        "kv_transfer_params": Refused((None, {}), "the router chooses the workers"),
        "vllm_xargs": Refused((None, {}), "leave it out"),
    },
)

CHAT = GENERATION | Fields(
    title="`POST /v1/chat/completions`",
    honoured={
        "messages": "see below",
        "max_completion_tokens": "as max_tokens",
        "logprobs": "true or false",
        "top_logprobs": "0 to 20, with logprobs",
        "tools": f"up to {MAX_TOOLS}",
        "tool_choice": "none, auto, required, a function, allowed_tools",
        "parallel_tool_calls": "false: one call at most",
        "chat_template_kwargs": "given to the chat template",
        "add_generation_prompt": "false: the template does not begin the answer",
        "continue_final_message": "the answer goes on with the last message",
        "reasoning_effort": "given to a template that knows it; none: enable_thinking false",
        "enable_thinking": "as in chat_template_kwargs",
        "include_reasoning": "false leaves the reasoning out of the answer",
        "thinking_token_budget": "tokens after which thinking is closed",
        "thinking_budget": "as thinking_token_budget",
    },
    accepted={
        "verbosity": "no template knows it",
    },
    refused={
        "functions": Refused((None, []), "use tools"),
        "function_call": Refused((None, "none"), "use tool_choice"),
        "modalities": Refused((None, ["text"]), _TEXT_ONLY),
        "audio": Refused((None,), _TEXT_ONLY),
        "web_search_options": Refused((None,), "offer a function for it in tools"),
        "documents": Refused(
            (None, []), "write them into a message, or give chat_template_kwargs.documents"
        ),
        "chat_template": Refused(
            (None,), "templates run in the router: set chat_template in the fleet's file"
        ),
        "echo": Refused((None, False), "put the last message before the answer yourself"),
    },
)

COMPLETION = GENERATION | Fields(
    title="`POST /v1/completions`",
    honoured={
        "prompt": "a text or token ids, or up to 64 of them",
        "echo": "the prompt stands before the answer",
        "logprobs": "0 to 20 alternatives",
    },
    refused={
        "suffix": Refused((None, ""), "write the model's own fill-in-the-middle tokens"),
        "messages": Refused((), "use /v1/chat/completions"),
        "prompt_embeds": Refused((None,), "send text or token ids"),
    },
)

STREAM_OPTIONS = Fields(
    title="`stream_options`",
    honoured={
        "include_usage": "a last chunk with the usage",
        "continuous_usage_stats": "with include_usage: the usage so far on every chunk",
    },
    accepted={"include_obfuscation": "nothing is padded"},
)

MESSAGE = Fields(
    title="a message",
    honoured={
        "role": "system, developer (as system where the template has none), user, assistant, tool",
        "content": "text, or parts of text",
        "tool_calls": "of an assistant",
        "tool_call_id": "of a tool's result",
        "name": "given to the chat template, which may show it",
        "refusal": "the text of a message without content",
        "reasoning_content": "given to a template that shows earlier reasoning",
        "reasoning": "as reasoning_content",
    },
    accepted={
        "annotations": "no part of the text",
        "parsed": "the content, parsed by the client",
        "id": "messages have no names here",
        "index": "the order is that of the list",
        "type": "every item is a message",
        "status": "no part of the text",
        "created_at": "no part of the text",
        "cache_control": "prefixes are found without a mark",
        "provider_specific_fields": "no part of the text",
        "reasoning_details": "see reasoning_content",
        "thinking_blocks": "see reasoning_content",
        "images": "empty, or of another model",
        "token_ids": "the text counts",
    },
    refused={
        "function_call": Refused((None,), "use tool_calls"),
        "audio": Refused((None,), _TEXT_ONLY),
        "prefix": Refused((None, False), "use continue_final_message"),
        "partial": Refused((None, False), "use continue_final_message"),
    },
)

PART = Fields(
    title="a part of a message's content",
    honoured={
        "type": "text, input_text, output_text, refusal; thinking is reasoning",
        "text": "parts stand on lines of their own",
        "refusal": "as text",
        "thinking": "as reasoning_content",
    },
    accepted={
        "cache_control": "prefixes are found without a mark",
        "annotations": "no part of the text",
        "logprobs": "no part of the text",
        "signature": "no part of the text",
        "id": "no part of the text",
        "index": "the order is that of the list",
    },
)

CALL = Fields(
    title="a replayed call, `tool_calls[]`",
    honoured={
        "id": "results name it",
        "type": "function",
        "function": "name and arguments",
    },
    accepted={
        "index": "the order is that of the list",
        "provider_specific_fields": "no part of the call",
        "extra_content": "no part of the call",
        "cache_control": "prefixes are found without a mark",
    },
)

CALLED_FUNCTION = Fields(
    title="the function of a replayed call",
    honoured={"name": "any text", "arguments": "any text; empty is `{}`; or an object"},
    accepted={
        "parsed_arguments": "the arguments, parsed by the client",
        "provider_specific_fields": "no part of the call",
    },
)

TOOL = Fields(
    title="a tool, `tools[]`",
    honoured={"type": "function", "function": "what may be called"},
    accepted={"cache_control": "prefixes are found without a mark"},
)

FUNCTION = Fields(
    title="a function that is offered",
    honoured={
        "name": "letters, digits and `_-.:/`",
        "description": "shown to the model",
        "parameters": "JSON schema of an object; calls keep to it",
        "strict": "false: keywords that cannot be enforced are checked afterwards",
    },
    accepted={"cache_control": "prefixes are found without a mark"},
)

RESPONSE_FORMAT = Fields(
    title="`response_format`",
    honoured={"type": "text, json_object, json_schema", "json_schema": "with that type"},
)

JSON_SCHEMA = Fields(
    title="`response_format.json_schema`",
    honoured={
        "schema": "the answer keeps to it",
        "strict": "false: keywords that cannot be enforced are checked afterwards",
    },
    accepted={
        "name": "the schema is not shown to the model",
        "description": "the schema is not shown to the model",
    },
)

STRUCTURED_OUTPUTS = Fields(
    title="`structured_outputs`",
    honoured={
        "json": "a JSON schema, as an object or as text",
        "json_object": "any object",
        "regex": "a full match",
        "choice": "one of the strings",
        "grammar": "Lark or GBNF",
    },
    accepted={"disable_fallback": "there is one backend"},
    refused={
        "disable_any_whitespace": Refused(
            (None, False), "write x-guidance: {whitespace_flexible: false} into the schema"
        ),
        "disable_additional_properties": Refused(
            (None, False, True), "objects are closed unless they say additionalProperties"
        ),
        "whitespace_pattern": Refused(
            (None,), "write x-guidance: {whitespace_pattern: ...} into the schema"
        ),
        "structural_tag": Refused((None,), "use tools, or a grammar"),
    },
)

# What the calls whose answer is made of vectors have in common.
VECTORS = Fields(
    honoured={
        "model": "left out: the model that the fleet serves",
        "pooling": "mean or last",
        "user": "stands in traces and in the request's story",
        "priority": "lower goes first",
    },
    accepted={
        "request_id": "the header X-Request-Id names a call",
        "additional_data": _KEPT,
        "metadata": _KEPT,
        "mm_processor_kwargs": "of images, which are not taken",
    },
)

EMBEDDING = VECTORS | Fields(
    title="`POST /v1/embeddings`",
    honoured={
        "input": "a text or token ids, or up to 2048 of them",
        "encoding_format": "float or base64",
        "dimensions": "cut the vector to so many",
        "normalize": "to length 1",
        "truncate_prompt_tokens": "keep the last so many tokens; -1: the whole context",
    },
    refused={
        "messages": Refused((None,), "send input"),
        "embed_dtype": Refused((None, "float32"), "vectors are float32"),
        "add_special_tokens": Refused((None, True), "send token ids"),
    },
)

TOKENIZE = Fields(
    title="`POST /tokenize`",
    honoured={
        "model": "left out: the model that the fleet serves",
        "prompt": "a text",
        "messages": "as in a chat",
        "tools": "as in a chat",
        "add_special_tokens": "for a prompt: true",
        "add_generation_prompt": "as in a chat",
        "continue_final_message": "as in a chat",
        "chat_template_kwargs": "as in a chat",
        "return_token_strs": "each token as text, too",
    },
    accepted={"mm_processor_kwargs": "of images, which are refused where they stand"},
    refused={"chat_template": CHAT.refused["chat_template"]},
)

DETOKENIZE = Fields(
    title="`POST /detokenize`",
    honoured={"model": "left out: the model that the fleet serves", "tokens": "token ids"},
)

LOAD_ADAPTER = Fields(
    title="`POST /v1/load_lora_adapter`",
    honoured={"lora_name": "the name of a model", "lora_path": "a directory"},
    refused={"load_inplace": Refused((None, False), "unload it first")},
)

UNLOAD_ADAPTER = Fields(
    title="`POST /v1/unload_lora_adapter`",
    honoured={"lora_name": "the name of a model"},
    accepted={"lora_int_id": "the name says which"},
)

TABLE = (
    CHAT,
    COMPLETION,
    STREAM_OPTIONS,
    MESSAGE,
    PART,
    CALL,
    CALLED_FUNCTION,
    TOOL,
    FUNCTION,
    RESPONSE_FORMAT,
    JSON_SCHEMA,
    STRUCTURED_OUTPUTS,
    EMBEDDING,
    TOKENIZE,
    DETOKENIZE,
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
)
