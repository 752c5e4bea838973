"""What chat and completions have in common."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import (
    INT32,
    Body,
    Choices,
    ModelBody,
    NonEmpty,
    TokenId,
    Truncation,
)

_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_FLOAT32 = 3.4e38  # what a temperature may be on the wire


class StreamOptions(Body):
    """What a stream tells besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    others = parameters.STREAM_OPTIONS


class JsonSchemaFormat(Body):
    """The schema of ``response_format``; it is always kept to, ``strict`` or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    others = parameters.JSON_SCHEMA


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    others = parameters.RESPONSE_FORMAT


class StructuredOutputs(Body):
    """vLLM's ways to say what an answer must look like."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None

    others = parameters.STRUCTURED_OUTPUTS


class GenerationBody(ModelBody):
    """What chat and completions have in common."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=_FLOAT32)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None

    others = parameters.GENERATION

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
