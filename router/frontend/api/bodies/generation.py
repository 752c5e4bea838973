"""What chat and completions have in common."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies.common import (
    INT32,
    Body,
    Choices,
    ModelBody,
    NonEmpty,
    TokenId,
    Truncation,
)
from router.frontend.api.bodies.fields import Fields, Refused

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_FLOAT32 = 3.4e38  # what a temperature may be on the wire

_HINT = "a hint about speed or price; every request is served alike"
_KEPT = "nothing is kept under it"
_BEAMS = Refused(
    (None, False),
    "there is no beam search, and no choosing the best of more answers than are sent: ask for n "
    "answers (n, temperature, seed) and choose among them by their logprobs",
)


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool = False
    """a last chunk with the usage"""
    continuous_usage_stats: bool = False
    """with include_usage: the usage so far on every chunk"""

    others = Fields(
        accepted={"include_obfuscation": "nothing is padded"},
    )


class JsonSchemaFormat(Body):
    """The schema of ``response_format``; it is always kept to, ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """the answer keeps to it"""
    strict: bool | None = None
    """false: keywords that cannot be enforced are checked afterwards"""

    others = Fields(
        accepted={
            "name": "the schema is not shown to the model",
            "description": "the schema is not shown to the model",
        },
    )


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    """text, json_object, json_schema"""
    json_schema: JsonSchemaFormat | None = None
    """with that type"""


class StructuredOutputs(Body):
    """vLLM's ways to say what an answer must look like."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    """a JSON schema, as an object or as text"""
    json_object: bool | None = None
    """any object"""
    regex: NonEmpty | None = None
    """a full match"""
    choice: Choices | None = None
    """one of the strings"""
    grammar: NonEmpty | None = None
    """Lark or GBNF"""

    others = Fields(
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


class GenerationBody(ModelBody):
    """What chat and completions have in common."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """chat: what the context leaves; completions: 16"""
    temperature: Annotated[float, Field(ge=0, le=_FLOAT32)] | None = None
    """0 is greedy; no upper limit but that of the number"""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """over 0, at most 1"""
    top_k: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    """-1 and 0 are off"""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 to 1"""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """equal seeds give equal answers"""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    """a string or up to 16"""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    """up to 64"""
    include_stop_str_in_output: bool | None = None
    """the text ends with what ended it"""
    skip_special_tokens: bool | None = None
    """false shows them"""
    bad_words: Annotated[list[_BadWord], Field(max_length=64)] | None = None
    """up to 64; never written, be it at the start of a word or within one"""
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """up to what one worker runs at once"""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """-100 to 100 by token id"""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """-2 to 2"""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """-2 to 2"""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """0.01 to 100"""
    ignore_eos: bool | None = None
    """go on to max_tokens"""
    min_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """no end before"""
    stream: bool | None = None
    """server-sent events"""
    stream_options: StreamOptions | None = None
    """only with stream"""
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """stands in traces and in the request's story"""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """lower goes first"""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives"""
    return_token_ids: bool | None = None
    """prompt_token_ids and token_ids beside the text"""
    truncate_prompt_tokens: Truncation | None = None
    """keep the last so many tokens; -1: what leaves room"""
    add_special_tokens: bool | None = None
    """whether the tokenizer adds its own; chat: false, completions: true"""
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """shares a cached prefix only with the same salt"""
    response_format: ResponseFormat | None = None
    """JSON, of any shape or of a schema"""
    structured_outputs: StructuredOutputs | None = None
    """JSON schema, regex, choice or grammar"""
    guided_json: dict[str, Any] | bool | str | None = None
    """as structured_outputs.json"""
    guided_regex: NonEmpty | None = None
    """as structured_outputs.regex"""
    guided_choice: Choices | None = None
    """as structured_outputs.choice"""
    guided_grammar: NonEmpty | None = None
    """as structured_outputs.grammar"""

    others = Fields(
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

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream tells the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )
