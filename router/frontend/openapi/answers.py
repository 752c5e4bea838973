"""What answers hold, for the description. Answers are written elsewhere, as plain dicts.

A test asks a router every example of ``router/frontend/openapi/calls.py`` and holds the answer
against its schema, so that the two do not drift apart. An answer may hold more than stands here.
"""

from typing import Any, Literal

from pydantic import BaseModel

Reason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    """What went wrong: ``code`` is for programs, ``param`` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """Every error of OpenAI's calls."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that were in a cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PooledUsage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class FunctionCall(BaseModel):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Reason
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CalledFunctionPart(BaseModel):
    """A piece of a call's function."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPart(BaseModel):
    """A piece of a call; the first one of each ``index`` has its id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionPart


class MessagePart(BaseModel):
    """A piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: MessagePart
    logprobs: dict[str, Any] | None
    finish_reason: Reason | None


class ChatCompletionChunk(BaseModel):
    """The data of one event; the last event's data is ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextLogprobs(BaseModel):
    """Log-probabilities in OpenAI's older shape."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None
    stop_reason: int | str | None = None


class TextCompletion(BaseModel):
    """Continuations of prompts; of a stream, the data of one event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class Embedding(BaseModel):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """A vector for each input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Score(BaseModel):
    """How near two texts are, from -1 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(BaseModel):
    """A score for each pair."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RankedDocument(BaseModel):
    """A document's text."""

    text: str


class RankedResult(BaseModel):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(BaseModel):
    """Documents, the nearest first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PooledUsage


class Pooled(BaseModel):
    """One vector."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PooledList(BaseModel):
    """A vector for each input."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: PooledUsage


class ModelCard(BaseModel):
    """What is served under a name; the base model's has more fields than an adapter's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None = None
    source: str | None = None
    architecture: str | None = None
    quantisation: str | None = None
    weights_digest: str | None = None


class ModelList(BaseModel):
    """Every name that requests may give."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenList(BaseModel):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenText(BaseModel):
    """The text of token ids."""

    prompt: str


class Version(BaseModel):
    """Baton's version."""

    version: str


class Load(BaseModel):
    """Requests that are not over."""

    server_load: int


class Liveness(BaseModel):
    """This process answers."""

    status: Literal["live"]


class ProbedPair(BaseModel):
    """What a probe through two workers found."""

    prefill: str
    decode: str
    ok: bool
    busy: bool
    seconds: float
    error: str | None


class Readiness(BaseModel):
    """The last round of probes."""

    status: Literal["ready", "not ready"]
    pairs: list[ProbedPair]
    starting: list[str]
    age_s: float
