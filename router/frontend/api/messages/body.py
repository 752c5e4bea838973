"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS
from router.frontend.api.messages import parameters


class MessagesBlock(Body):
    """A content block; which fields it has depends on its type."""

    type: NonEmpty
    text: str | None = None
    thinking: str | None = None
    id: NonEmpty | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: NonEmpty | None = None
    content: "str | Annotated[list[MessagesBlock], FIRST_FAULT] | None" = None
    is_error: bool | None = None

    others = parameters.BLOCK


class MessagesTurn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[MessagesBlock], FIRST_FAULT]

    others = parameters.MESSAGE


class MessagesTool(Body):
    """A tool of the client's."""

    type: str | None = None
    name: NonEmpty
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    others = parameters.TOOL


class MessagesToolChoice(Body):
    """Whether tools are to be used; ``name`` with type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool = False

    others = parameters.TOOL_CHOICE


class MessagesMetadata(Body):
    """Who the client asks for."""

    user_id: str | None = None

    others = parameters.METADATA


class MessagesOutputFormat(Body):
    """The shape of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    others = parameters.OUTPUT_FORMAT


class MessagesOutputConfig(Body):
    """What the answer is to look like."""

    format: MessagesOutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None

    others = parameters.OUTPUT_CONFIG


class MessagesThinking(Body):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    others = parameters.THINKING


class CountTokensBody(ModelBody):
    """``POST /v1/messages/count_tokens``: a message without what its answer is to be."""

    messages: Annotated[list[MessagesTurn], Field(min_length=1), FIRST_FAULT]
    system: str | Annotated[list[MessagesBlock], FIRST_FAULT] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutputConfig | None = None

    others = parameters.COUNT_TOKENS


class MessagesBody(CountTokensBody):
    """``POST /v1/messages``. ``priority`` and ``cache_salt`` are Baton's own."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessagesMetadata | None = None
    thread: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None

    others = parameters.MESSAGES
