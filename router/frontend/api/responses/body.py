"""Bodies of the Responses API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS
from router.frontend.api.responses import parameters as table


class ResponsesPart(Body):
    """A part of an item's content."""

    type: NonEmpty
    text: str | None = None
    refusal: str | None = None

    others = table.PART


class ResponsesItem(Body):
    """An item of a conversation; which fields it has depends on its type."""

    type: NonEmpty = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    status: str | None = None
    call_id: NonEmpty | None = None
    name: NonEmpty | None = None
    arguments: str | None = None
    output: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    summary: Annotated[list[ResponsesPart], FIRST_FAULT] | None = None

    others = table.ITEM


class ResponsesFunction(Body):
    """A function that may be called."""

    type: NonEmpty
    name: NonEmpty | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    others = table.FUNCTION


class ResponsesFunctionName(Body):
    """A function, by its name."""

    type: NonEmpty
    name: NonEmpty | None = None

    others = table.FUNCTION_NAMED


class ResponsesToolChoice(ResponsesFunctionName):
    """The function that must be called; or, with ``allowed_tools``, those that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesFunctionName] | None = None

    others = table.TOOL_CHOICE


class ResponsesTextFormat(Body):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    others = table.TEXT_FORMAT


class ResponsesText(Body):
    """What the answer's text is to look like."""

    format: ResponsesTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    others = table.TEXT


class ResponsesReasoning(Body):
    """How much the model is to think."""

    effort: str | None = None
    summary: str | None = None

    others = table.REASONING


class InputTokensBody(ModelBody):
    """``POST /v1/responses/input_tokens``: a response without what its answer is to be."""

    input: str | Annotated[list[ResponsesItem], FIRST_FAULT] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[ResponsesFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    others = table.INPUT_TOKENS


class ResponsesBody(InputTokensBody):
    """``POST /v1/responses``. ``priority``, ``seed`` and ``cache_salt`` are not OpenAI's."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    priority: int | None = None
    seed: int | None = None
    cache_salt: str | None = None

    others = table.RESPONSES

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to have log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def keeps(self) -> bool:
        """Whether the response is to be kept: unless said otherwise, as OpenAI does."""
        return self.store is not False
