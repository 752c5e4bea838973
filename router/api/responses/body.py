"""Bodies of the Responses API."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from router.api.bodies.common import FIRST_FAULT, INT32, Body, NonEmpty


class _Tolerant(Body):
    """What is not listed changes nothing here (``annotations``, ``phase`` and the like)."""

    model_config = ConfigDict(strict=False, extra="ignore", serialize_by_alias=True)


class ContentPart(_Tolerant):
    """A part of an item's content."""

    type: NonEmpty
    text: str | None = None
    refusal: str | None = None


class Item(_Tolerant):
    """An item of a conversation; which fields it has depends on its type."""

    type: NonEmpty = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[ContentPart], FIRST_FAULT] | None = None
    status: str | None = None
    call_id: NonEmpty | None = None
    name: NonEmpty | None = None
    arguments: str | None = None
    output: str | Annotated[list[ContentPart], FIRST_FAULT] | None = None


class FunctionGiven(_Tolerant):
    """A function that may be called."""

    type: NonEmpty
    name: NonEmpty | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionNamed(_Tolerant):
    """A function, by its name."""

    type: NonEmpty
    name: NonEmpty | None = None


class ToolChoiceGiven(FunctionNamed):
    """The function that must be called; or, with ``allowed_tools``, those that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: list[FunctionNamed] | None = None


class TextFormat(_Tolerant):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextGiven(_Tolerant):
    """What the answer's text is to look like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningGiven(_Tolerant):
    """How much the model is to think."""

    effort: str | None = None
    summary: str | None = None


class InputTokensBody(_Tolerant):
    """``POST /v1/responses/input_tokens``: a response without what its answer is to be."""

    model: NonEmpty
    input: str | Annotated[list[Item], FIRST_FAULT] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionGiven], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceGiven | None = None
    parallel_tool_calls: bool | None = None
    text: TextGiven | None = None
    reasoning: ReasoningGiven | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None


class ResponsesBody(InputTokensBody):
    """``POST /v1/responses``. ``priority``, ``seed`` and ``cache_salt`` are not OpenAI's."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    background: bool | None = None
    prompt: Any = None
    priority: int | None = None
    seed: int | None = None
    cache_salt: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to have log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def keeps(self) -> bool:
        """Whether the response is to be kept: unless said otherwise, as OpenAI does."""
        return self.store is not False
