"""What the answers of the newer APIs hold, for the description; see ``answers.py``."""

from typing import Any, Literal

from pydantic import BaseModel, Field

Status = Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]


class ItemContent(BaseModel):
    """A part of an item: text, or thinking."""

    type: Literal["output_text", "reasoning_text", "input_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class ResponseItem(BaseModel):
    """A message, a call or thinking; which fields it has depends on its type."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Status
    role: Literal["assistant"] | None = None
    content: list[ItemContent] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(BaseModel):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(BaseModel):
    """The answer to a conversation, as items. ``not_stored`` is Baton's own: why it is not kept."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    status: Status
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[ResponseItem]
    instructions: str | None
    previous_response_id: str | None
    store: bool
    not_stored: str | None = None
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    max_output_tokens: int | None
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """The data of one event; its name is the type. Other fields depend on it."""

    type: str = Field(pattern=r"^response\.[a-z_.]+$")
    sequence_number: int
    response: Response | None = None
    item: ResponseItem | None = None
    output_index: int | None = None
    delta: str | None = None


class InputTokens(BaseModel):
    """How many tokens the model would read."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(BaseModel):
    """A response that is kept no longer."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(BaseModel):
    """A page of the items that were given for a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ContentBlock(BaseModel):
    """Text, a call or thinking; which fields it has depends on its type."""

    type: Literal["text", "tool_use", "thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    thinking: str | None = None
    signature: str | None = None


class MessageUsage(BaseModel):
    """Tokens read, those from a cache beside them, and tokens written."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class AnsweredMessage(BaseModel):
    """The model's message, as content blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: (
        Literal[
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ]
        | None
    )
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """The data of one event; its name is the type. Other fields depend on it."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: AnsweredMessage | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None


class MessageErrorDetail(BaseModel):
    """What went wrong; ``details`` has Baton's code and the field at fault."""

    type: str
    message: str
    details: dict[str, str | None]


class MessageError(BaseModel):
    """Every error of Anthropic's calls."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


class CountedTokens(BaseModel):
    """How many tokens the model would read."""

    input_tokens: int
