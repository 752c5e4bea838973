"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS, Fields, Refused

_CACHED = "prefixes are found without a mark"
_NO_TEXT = "of images and documents, which are refused where they stand"
_HINT = "a hint about speed or place; every request is served alike"
_THEIRS = "offer tools of your own, with input_schema"


class MessagesBlock(Body):
    """A content block; which fields it has depends on its type."""

    type: NonEmpty
    """text, tool_use, tool_result, thinking, redacted_thinking (which nobody can read)"""
    text: str | None = None
    """of a text"""
    thinking: str | None = None
    """given to a template that shows earlier reasoning"""
    id: NonEmpty | None = None
    """of a call"""
    name: str | None = None
    """of a call"""
    input: dict[str, Any] | None = None
    """of a call"""
    tool_use_id: NonEmpty | None = None
    """of a result"""
    content: "str | Annotated[list[MessagesBlock], FIRST_FAULT] | None" = None
    """of a result: text, or blocks of text"""
    is_error: bool | None = None
    """the result begins with `Error: `"""

    others = Fields(
        accepted={
            "cache_control": _CACHED,
            "citations": "no part of the text",
            "signature": "no part of the text",
            "data": "of redacted thinking",
            "source": _NO_TEXT,
            "title": _NO_TEXT,
            "context": _NO_TEXT,
            "file_id": _NO_TEXT,
            "caller": "no part of the call",
            "toolset_name": "no part of the call",
        },
    )


class MessagesTurn(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    """user, assistant, system"""
    content: str | Annotated[list[MessagesBlock], FIRST_FAULT]
    """text, or blocks"""

    others = Fields(
        accepted={
            "id": "messages have no names here",
            "type": "every item is a message",
            "model": "who wrote it does not matter",
            "stop_reason": "no part of the text",
            "stop_sequence": "no part of the text",
            "usage": "no part of the text",
        },
    )


class MessagesTool(Body):
    """A tool of the client's."""

    type: str | None = None
    """custom"""
    name: NonEmpty
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    input_schema: dict[str, Any] | None = None
    """JSON schema of an object; calls keep to it"""
    strict: bool | None = None
    """false: keywords that cannot be enforced are checked afterwards"""

    others = Fields(
        accepted={
            "cache_control": _CACHED,
            "eager_input_streaming": "arguments are streamed as they are written",
            "input_examples": "not shown to the model",
            "allowed_callers": "only the model calls",
            "defer_loading": "every tool is told at once",
        },
    )


class MessagesToolChoice(Body):
    """Whether tools are to be used; ``name`` with type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    """auto, any, tool, none"""
    name: NonEmpty | None = None
    """with tool"""
    disable_parallel_tool_use: bool = False
    """one call at most"""


class MessagesMetadata(Body):
    """Who the client asks for."""

    user_id: str | None = None
    """stands in traces and in the request's story"""


class MessagesOutputFormat(Body):
    """The shape of the answer's text."""

    type: Literal["json_schema"]
    """json_schema"""
    schema_: dict[str, Any] = Field(alias="schema")
    """the answer keeps to it"""


class MessagesOutputConfig(Body):
    """What the answer is to look like."""

    format: MessagesOutputFormat | None = None
    """a JSON schema"""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """given to a template that knows it"""

    others = Fields(
        accepted={"task_budget": "a hint to the model, which no template knows"},
    )


class MessagesThinking(Body):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """disabled, or any other; of a model that does not think it changes nothing"""
    budget_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """tokens after which thinking is closed"""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves the thinking out of the answer"""


class CountTokensBody(ModelBody):
    """``POST /v1/messages/count_tokens``: a message without what its answer is to be."""

    messages: Annotated[list[MessagesTurn], Field(min_length=1), FIRST_FAULT]
    """turns of one side that follow each other are joined; an assistant's last one is continued"""
    system: str | Annotated[list[MessagesBlock], FIRST_FAULT] | None = None
    """text, or blocks of text"""
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    """up to 512"""
    tool_choice: MessagesToolChoice | None = None
    """see below"""
    thinking: MessagesThinking | None = None
    """see below"""
    output_config: MessagesOutputConfig | None = None
    """see below"""

    others = Fields(
        accepted={
            "cache_control": _CACHED,
            "service_tier": _HINT,
            "speed": _HINT,
            "inference_geo": _HINT,
            "billing_policy": _HINT,
            "fallbacks": "nothing is declined",
            "fallback_credit_token": "nothing is declined",
            "diagnostics": "GET /fleet/requests/{id} tells more",
            "user_profile_id": "nothing is kept under it",
            "workspace_id": "nothing is kept under it",
        },
        refused={
            "container": Refused((None,), _THEIRS),
            "mcp_servers": Refused((None, []), _THEIRS),
            "compaction": Refused((None,), "ask for a summary in a message"),
            "context_management": Refused(
                (None, {}, {"edits": []}), "send the messages that are to be read"
            ),
        },
    )


class MessagesBody(CountTokensBody):
    """``POST /v1/messages``. ``priority`` and ``cache_salt`` are Baton's own."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)]
    """may be beyond the context, which then is the limit"""
    stop_sequences: list[str] | None = None
    """up to 16"""
    stream: bool | None = None
    """server-sent events"""
    temperature: float | None = None
    """0 is greedy"""
    top_p: float | None = None
    """over 0, at most 1"""
    top_k: int | None = None
    """0 is off"""
    metadata: MessagesMetadata | None = None
    """see below"""
    thread: dict[str, Any] | None = None
    """400 `thread_unsupported_request`: clients then send the whole conversation"""
    priority: int | None = None
    """Baton's own: lower goes first"""
    cache_salt: str | None = None
    """Baton's own: shares a cached prefix only with the same salt"""
