"""Request fields that chat and text completions share."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies.common import (
    FIRST_FAULT,
    INT32,
    Body,
    Choices,
    ModelBody,
    NonEmpty,
    TokenId,
    Truncation,
)
from router.frontend.api.bodies.fields import Refused
from router.sessions.hints import RETENTION

_Stop = Annotated[str, StringConstraints(max_length=1024)]
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_FLOAT32 = 3.4e38  # largest temperature that fits the wire format

_HINT = "a hint about speed or price; all requests are served alike"
_STORED = "nothing is stored under it"
_BEAMS = Refused(
    (None, False),
    "there is no beam search and no best_of: request several answers (n, temperature, seed) and "
    "choose among them by their logprobs",
)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """true: the last chunk contains the usage"""
    continuous_usage_stats: bool = False
    """true: every chunk contains the usage so far; requires include_usage"""

    accepted: ClassVar[dict[str, str]] = {"include_obfuscation": "chunks are not padded"}


class JsonSchemaFormat(Body):
    """Schema of ``response_format``; always enforced, whatever ``strict`` is."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """JSON schema that the answer follows"""
    strict: bool | None = None
    """false: keywords that cannot be enforced during generation are checked afterwards"""

    accepted: ClassVar[dict[str, str]] = {
        "name": "the schema is not shown to the model",
        "description": "the schema is not shown to the model",
    }


class ResponseFormat(Body):
    """OpenAI's format of answers: text or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    """text, json_object, json_schema"""
    json_schema: JsonSchemaFormat | None = None
    """required for type json_schema"""

    refused: ClassVar[dict[str, Refused]] = {
        "schema": Refused((), "use type json_schema, and json_schema: {name, schema}")
    }


class StructuredOutputs(Body):
    """vLLM's constraints on the form of an answer; at most one of them."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    """JSON schema, as an object or as text"""
    json_object: bool | None = None
    """true: any JSON object"""
    regex: NonEmpty | None = None
    """regular expression that the whole answer matches"""
    choice: Choices | None = None
    """strings, one of which is the answer"""
    grammar: NonEmpty | None = None
    """grammar in Lark or GBNF"""

    accepted: ClassVar[dict[str, str]] = dict.fromkeys(
        ("disable_fallback", "_backend", "_backend_was_auto"), "there is only one backend"
    )
    refused: ClassVar[dict[str, Refused]] = {
        "disable_any_whitespace": Refused(
            (None, False), "add x-guidance: {whitespace_flexible: false} to the schema"
        ),
        "disable_additional_properties": Refused(
            (None, False, True),
            "objects have no additional properties unless the schema sets additionalProperties",
        ),
        "whitespace_pattern": Refused(
            (None,), "add x-guidance: {whitespace_pattern: ...} to the schema"
        ),
        "structural_tag": Refused((None,), "use tools or a grammar"),
    }


class AgentHints(Body):
    """Dynamo's hints of agents."""

    osl: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """expected output tokens, for the choice of workers; default: the mean of earlier responses"""

    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """turn among the tenant's requests, unless service_tier has one; higher values go first"""

    accepted: ClassVar[dict[str, str]] = {
        "strict_priority": "priority is a field of the request",
        "speculative_prefill": "nothing is computed before it is requested",
        "latency_sensitivity": _HINT,
    }


class NvExtension(Body):
    """Dynamo's extension of requests."""

    agent_hints: AgentHints | None = None
    """see below"""


class SamplingFields(Body):
    """Fields of generation that vLLM's ``SamplingParams`` have too."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """default: the space that the prompt leaves in the context"""
    temperature: Annotated[float, Field(ge=0, le=_FLOAT32)] | None = None
    """0 or more; 0 is greedy"""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 to 1; 0 keeps only the likeliest token"""
    top_k: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    """-1 and 0 switch it off"""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 to 1"""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """requests with equal seeds get equal answers"""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16), FIRST_FAULT] | None = None
    """a string, or a list of up to 16; empty strings are ignored"""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64), FIRST_FAULT] | None = None
    """up to 64"""
    include_stop_str_in_output: bool | None = None
    """true: the text includes the stop string"""
    skip_special_tokens: bool | None = None
    """false: special tokens appear in the text"""
    bad_words: Annotated[list[_BadWord], Field(max_length=64), FIRST_FAULT] | None = None
    """up to 64 texts that are not generated, neither at the start of a word nor within one"""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """number of answers; at most the requests that one worker runs at once"""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """-100 to 100 by token id"""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """-2 to 2"""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """-2 to 2"""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """0.01 to 100"""
    ignore_eos: bool | None = None
    """true: generate until max_tokens"""
    min_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """minimum number of output tokens"""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives"""
    structured_outputs: StructuredOutputs | None = None
    """a JSON schema, a regex, a choice or a grammar"""

    accepted: ClassVar[dict[str, str]] = {
        "spaces_between_special_tokens": "spaces are never added between them",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "allowed_token_ids": Refused((None, []), "use structured_outputs"),
        "logits_processors": Refused((None, []), "use logit_bias or a grammar"),
        "logprob_token_ids": Refused((None, []), "use top_logprobs"),
    }


class GenerationBody(SamplingFields, ModelBody):
    """Fields that chat and text completions share."""

    shows_stop_token: ClassVar[bool] = False  # as the last of the response's token ids

    stream: bool | None = None
    """server-sent events"""
    stream_options: StreamOptions | None = None
    """requires `stream: true`"""
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """recorded in traces and in the request report"""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """requests with lower values run first"""
    return_token_ids: bool | None = None
    """true: add prompt_token_ids and token_ids to the response"""
    truncate_prompt_tokens: Truncation | None = None
    """number of last prompt tokens to keep; -1: as many as leave room for the answer"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its special tokens; default in chat false, in completions true"""
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """only requests with the same salt share cached prefixes"""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=512)] | None = None
    """names the session in request reports; prefixes are cached without keys"""
    prompt_cache_retention: Annotated[str, StringConstraints(pattern=RETENTION)] | None = None
    """time, such as 24h, that its KV stays cached before other KV; in_memory: no longer"""
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None
    """flex: waits behind other requests of the tenant, priority: before them; others: no effect"""
    nvext: NvExtension | None = None
    """Dynamo's extension: agent_hints"""
    response_format: ResponseFormat | None = None
    """text, any JSON object, or JSON that follows a schema"""
    guided_json: dict[str, Any] | bool | str | None = None
    """same as structured_outputs.json"""
    guided_regex: NonEmpty | None = None
    """same as structured_outputs.regex"""
    guided_choice: Choices | None = None
    """same as structured_outputs.choice"""
    guided_grammar: NonEmpty | None = None
    """same as structured_outputs.grammar"""

    accepted: ClassVar[dict[str, str]] = {
        "metadata": _STORED,
        "store": _STORED,
        "safety_identifier": "nothing is reported to third parties",
        "prediction": _HINT,
        "guided_decoding_backend": "there is only one backend",
        "request_id": "the header X-Request-Id identifies a request",
        "mm_processor_kwargs": "applies only to images, which are rejected",
        "media_io_kwargs": "applies only to images, which are rejected",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "use_beam_search": _BEAMS,
        "num_beams": Refused((None, 1), _BEAMS.instead),
        "length_penalty": Refused((None, 1), _BEAMS.instead),
        "early_stopping": _BEAMS,
        "best_of": Refused((None, 1), _BEAMS.instead),  # the value of n is accepted: see parse.py
        "guided_whitespace_pattern": Refused(
            (None,), "add x-guidance: {whitespace_pattern: ...} to the schema"
        ),
        "grammar": Refused((), "use structured_outputs.grammar"),
        "json_schema": Refused((), "use response_format"),
        "output_format": Refused((), "use response_format"),
        "regex": Refused((), "use structured_outputs.regex"),
        "ebnf": Refused((), "use structured_outputs.grammar"),
        "structural_tag": Refused((), "use tools or a grammar"),
        "guided_json_object": Refused((None, False), "use response_format"),
        "return_tokens_as_token_ids": Refused((None, False), "use return_token_ids"),
        "kv_transfer_params": Refused((None, {}), "the router chooses the workers"),
        "vllm_xargs": Refused((None, {}), "leave it out"),
    }

    @property
    def agent_hints(self) -> AgentHints:
        """Hints in ``nvext``, or none."""
        given = self.nvext.agent_hints if self.nvext is not None else None
        return given or AgentHints()

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in listed if text)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with a chunk that contains the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if every chunk of a stream contains the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )
