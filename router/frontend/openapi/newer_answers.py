"""What `/v1/responses` and `/v1/messages` answer, for the description."""

from typing import Any, Literal

from pydantic import BaseModel


class ResponsesUsage(BaseModel):
    """Tokens read and written, by the newer names."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(BaseModel):
    """A response; ``output`` has messages, calls and reasoning."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: ResponsesUsage | None


class NamedEvent(BaseModel):
    """The data of one event of a stream; its ``type`` says what else it has."""

    type: str


class DeletedResponse(BaseModel):
    """A response that is kept no longer."""

    id: str
    deleted: bool


class InputItems(BaseModel):
    """What was given for a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class InputTokens(BaseModel):
    """How many tokens the model would read."""

    input_tokens: int


class MessagesUsage(BaseModel):
    """Tokens read and written, as Anthropic counts them."""

    input_tokens: int
    output_tokens: int


class MessagesAnswer(BaseModel):
    """A message; ``content`` has blocks of text, thinking and calls."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesErrorDetail(BaseModel):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesError(BaseModel):
    """Every error of the Messages API."""

    type: Literal["error"]
    error: MessagesErrorDetail
