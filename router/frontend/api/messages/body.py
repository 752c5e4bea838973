"""Request bodies of Anthropic's Messages API."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS, Refused
from router.frontend.api.bodies.opening import opening_of_turns

_NO_TEXT = "applies only to documents, which are rejected"
_HINT = "a hint about speed or location; all requests are served alike"
_THEIRS = "define the tools in tools, with input_schema"


class CacheControl(Body):
    """Mark of a prefix that is sent again."""

    type: Literal["ephemeral"]
    """ephemeral"""
    ttl: Literal["5m", "1h"] = "5m"
    """time that the KV of the call stays cached before other KV: 5m, 1h; the longest one counts"""

    accepted: ClassVar[dict[str, str]] = {"scope": "tenants share no prefixes by default"}


class MessagesBlock(Body):
    """A content block; its type determines its fields."""

    type: NonEmpty
    """text, image, tool_use, tool_result, thinking, redacted_thinking (encrypted, so ignored)"""
    text: str | None = None
    """the text of a text block"""
    source: dict[str, Any] | None = None
    """an image, for models that vLLM serves with images: `data` in base64, or a URL as in chats"""
    thinking: str | None = None
    """passed to chat templates that include earlier reasoning"""
    id: NonEmpty | None = None
    """id of a call (tool_use)"""
    name: str | None = None
    """name of the called tool"""
    input: dict[str, Any] | None = None
    """arguments of a call"""
    tool_use_id: NonEmpty | None = None
    """id of the call that a tool_result belongs to"""
    content: "str | Annotated[list[MessagesBlock], FIRST_FAULT] | None" = None
    """result of a tool: text, or blocks of text and images"""
    is_error: bool | None = None
    """true: the model sees `Error: ` before the result"""
    cache_control: CacheControl | None = None
    """see below"""

    accepted: ClassVar[dict[str, str]] = {
        "citations": "not part of the text",
        "signature": "not part of the text",
        "data": "redacted thinking is not used",
        "title": _NO_TEXT,
        "context": _NO_TEXT,
        "file_id": _NO_TEXT,
        "caller": "not part of the call",
        "toolset_name": "not part of the call",
    }


class MessagesTurn(Body):
    """A message of one role."""

    role: Literal["user", "assistant", "system"]
    """user, assistant, system"""
    content: str | Annotated[list[MessagesBlock], FIRST_FAULT]
    """text, or content blocks"""

    accepted: ClassVar[dict[str, str]] = {
        "id": "message ids are not used",
        "type": "all items are messages",
        "model": "output of all models is accepted",
        "stop_reason": "not part of the text",
        "stop_sequence": "not part of the text",
        "usage": "not part of the text",
    }


class MessagesTool(Body):
    """A tool that the client implements.

    Tools of other types are left out and named in ``x-baton-ignored``.
    """

    type: str | None = None
    """custom"""
    name: NonEmpty | None = None
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    input_schema: dict[str, Any] | None = None
    """JSON schema of an object; the arguments of calls follow it"""
    strict: bool | None = None
    """true: a schema that cannot be enforced in full is a 400; otherwise the rest is enforced"""
    cache_control: CacheControl | None = None
    """see below"""

    accepted: ClassVar[dict[str, str]] = {
        "eager_input_streaming": "arguments are always streamed as they are generated",
        "input_examples": "not shown to the model",
        "allowed_callers": "only the model calls tools",
        "defer_loading": "all tools are shown to the model at once",
    }
    used_types: ClassVar[tuple[str | None, ...]] = (None, "custom")


class MessagesToolChoice(Body):
    """Choice among the tools; type ``tool`` requires ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    """auto, any, tool, none"""
    name: NonEmpty | None = None
    """name of the tool that must be called, for type tool"""
    disable_parallel_tool_use: bool = False
    """true: at most one call"""


class ContextAmount(Body):
    """A number of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    """input_tokens, tool_uses, thinking_turns, all"""
    value: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """the number; required, except for type all"""


class ContextEdit(Body):
    """An edit of the conversation before the model sees it; others than these two are left out."""

    type: NonEmpty
    """clear_thinking_20251015, clear_tool_uses_20250919"""
    keep: Literal["all"] | ContextAmount | None = None
    """last turns with thinking (default 1) or tool uses (default 3) that are kept"""
    trigger: ContextAmount | None = None
    """tool uses are cleared if the prompt has more than this (default 100000 input_tokens)"""
    clear_at_least: ContextAmount | None = None
    """input_tokens; fewer are not cleared at all"""
    exclude_tools: Annotated[list[str], FIRST_FAULT] | None = None
    """names of tools whose results are kept"""
    clear_tool_inputs: bool | Annotated[list[str], FIRST_FAULT] | None = None
    """true, or names of tools: the arguments of cleared calls are removed, too"""


class ContextManagement(Body):
    """Edits of the conversation."""

    edits: Annotated[list[ContextEdit], Field(max_length=16), FIRST_FAULT] = Field(
        default_factory=list
    )
    """applied in this order"""


class MessagesMetadata(Body):
    """Metadata of a request."""

    user_id: str | None = None
    """recorded in traces and in the request report"""


class MessagesOutputFormat(Body):
    """Format of the answer's text."""

    type: Literal["json_schema"]
    """json_schema"""
    schema_: dict[str, Any] = Field(alias="schema")
    """JSON schema that the answer follows"""


class MessagesOutputConfig(Body):
    """Format of the answer and effort."""

    format: MessagesOutputFormat | None = None
    """a JSON schema"""
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """passed to chat templates that support it"""

    accepted: ClassVar[dict[str, str]] = {"task_budget": "no chat template supports it"}


class MessagesThinking(Body):
    """Thinking before the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """disabled; any other value enables it; no effect for models without thinking"""
    budget_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """number of tokens after which thinking ends"""
    display: Literal["summarized", "omitted"] | None = None
    """omitted: the answer does not contain the thinking"""


class CountTokensBody(ModelBody):
    """Request body of ``POST /v1/messages/count_tokens``: the fields that determine the prompt."""

    messages: Annotated[list[MessagesTurn], Field(min_length=1), FIRST_FAULT]
    """consecutive messages of one role are joined; a last assistant message is continued"""
    system: str | Annotated[list[MessagesBlock], FIRST_FAULT] | None = None
    """text, or text blocks"""
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None
    """up to 512"""
    tool_choice: MessagesToolChoice | None = None
    """see below"""
    thinking: MessagesThinking | None = None
    """see below"""
    output_config: MessagesOutputConfig | None = None
    """see below"""
    context_management: ContextManagement | None = None
    """edits of the conversation before the model sees it"""
    cache_control: CacheControl | None = None
    """see below"""
    service_tier: Annotated[str, StringConstraints(max_length=64)] | None = None
    """as in chat completions; Anthropic's values have no effect"""

    accepted: ClassVar[dict[str, str]] = {
        "speed": _HINT,
        "inference_geo": _HINT,
        "billing_policy": _HINT,
        "fallbacks": "no request is passed to another model",
        "fallback_credit_token": "no request is passed to another model",
        "diagnostics": "GET /fleet/requests/{id} returns the request report",
        "user_profile_id": "nothing is stored under it",
        "workspace_id": "nothing is stored under it",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "container": Refused((None,), _THEIRS),
        "mcp_servers": Refused((None, []), _THEIRS),
        "compaction": Refused((None,), "ask for a summary in a message"),
        "output_format": Refused((), "use output_config.format"),
        "response_format": Refused((), "use output_config.format"),
        "stop": Refused((), "use stop_sequences"),
    }

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return opening_of_turns(self.messages)


class MessagesBody(CountTokensBody):
    """Request body of ``POST /v1/messages``. ``priority`` and ``cache_salt`` are Baton's own."""

    max_tokens: Annotated[int, Field(ge=1, lt=INT32)]
    """limited to the space that the prompt leaves in the context"""
    stop_sequences: Annotated[list[str], FIRST_FAULT] | None = None
    """up to 16"""
    stream: bool | None = None
    """server-sent events"""
    temperature: float | None = None
    """0 is greedy"""
    top_p: float | None = None
    """greater than 0, at most 1"""
    top_k: int | None = None
    """0 switches it off"""
    metadata: MessagesMetadata | None = None
    """see below"""
    thread: dict[str, Any] | None = None
    """rejected with 400 `thread_unsupported_request`; clients then send the whole conversation"""
    priority: int | None = None
    """Baton's own: requests with lower values run first"""
    cache_salt: str | None = None
    """Baton's own: only requests with the same salt share cached prefixes"""
