"""Request bodies of OpenAI's Responses API."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS, Refused
from router.frontend.api.bodies.opening import opening_of_turns

_NO_TEXT = "applies only to files and audio, which are rejected"
_HINT = "a hint about speed or price; all requests are served alike"


class ResponsesPart(Body):
    """A part of an item's content."""

    type: NonEmpty
    """input_text, input_image, output_text, text, refusal, reasoning_text, summary_text"""
    text: str | None = None
    """each part is placed on its own line"""
    refusal: str | None = None
    """same as text"""
    image_url: NonEmpty | None = None
    """`data:` URL of an image, for models that vLLM serves with images"""

    accepted: ClassVar[dict[str, str]] = {
        "annotations": "not part of the text",
        "logprobs": "not part of the text",
        "parsed": "the text, parsed by the client",
        "prompt_cache_breakpoint": "prefixes are cached without markers",
        "detail": "the model's processor sets the resolution",
        "file_id": _NO_TEXT,
        "file_url": _NO_TEXT,
        "file_data": _NO_TEXT,
        "filename": _NO_TEXT,
        "input_audio": _NO_TEXT,
    }


class ResponsesItem(Body):
    """An item of a conversation; its type determines its fields."""

    type: NonEmpty = "message"
    """message, function_call, custom_tool_call, their outputs, item_reference, reasoning"""
    id: str | None = None
    """id; in an item_reference, that of an item of a stored response"""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """role of a message: user, assistant, system, developer (treated as system)"""
    content: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """content of a message or of reasoning: text, or parts of text and images"""
    status: str | None = None
    """stored with the item"""
    call_id: NonEmpty | None = None
    """id of a call, repeated in its output"""
    name: NonEmpty | None = None
    """name of the called function"""
    namespace: str | None = None
    """namespace of the called function"""
    arguments: str | None = None
    """arguments of a call"""
    input: str | None = None
    """input of a call of a custom tool"""
    output: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """output of a call: text, or parts of text and images"""
    summary: Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """summary of reasoning, used if content is missing"""

    accepted: ClassVar[dict[str, str]] = {
        "phase": "not part of the text",
        "encrypted_content": "encrypted reasoning is not used",
        "caller": "not part of the call",
        "async": "not part of the call",
        "parsed_arguments": "the arguments, parsed by the client",
        "created_by": "not part of the text",
    }


class ResponsesInputFormat(Body):
    """Format of a custom tool's input."""

    type: Literal["text", "grammar"]
    """text, grammar"""
    syntax: Literal["lark", "regex"] | None = None
    """regex: enforced; lark: shown to the model"""
    definition: NonEmpty | None = None
    """text of the grammar"""


class ResponsesTool(Body):
    """A tool. Tools of other types are left out and named in ``x-baton-ignored``."""

    type: NonEmpty
    """function, custom, namespace"""
    name: NonEmpty | None = None
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; the arguments of calls follow it"""
    strict: bool | None = None
    """true: a schema that cannot be enforced in full is a 400; otherwise the rest is enforced"""
    format: ResponsesInputFormat | None = None
    """input of a custom tool: text, or text that follows a grammar"""
    tools: "Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None" = None
    """tools of a namespace, called as namespace.name"""

    accepted: ClassVar[dict[str, str]] = {
        "allowed_callers": "only the model calls functions",
        "defer_loading": "all tools are shown to the model at once",
        "output_schema": "not shown to the model",
    }
    used_types: ClassVar[tuple[str | None, ...]] = ("function", "custom", "namespace")


class ResponsesFunctionName(Body):
    """The name of a tool."""

    type: NonEmpty
    """function, custom"""
    name: NonEmpty | None = None
    """name of the tool"""


class ResponsesToolChoice(ResponsesFunctionName):
    """The tool that must be called or, with ``allowed_tools``, those that may be called."""

    type: NonEmpty
    """function, custom, allowed_tools"""
    mode: Literal["auto", "required"] | None = None
    """auto or required; only for allowed_tools"""
    tools: Annotated[list[ResponsesFunctionName], FIRST_FAULT] | None = None
    """tools that may be called; only for allowed_tools; the model still sees all tools"""


class ResponsesTextFormat(Body):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    """text, json_object, json_schema"""
    name: str | None = None
    """repeated in the response"""
    description: str | None = None
    """repeated in the response"""
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """JSON schema that the answer follows"""
    strict: bool | None = None
    """false: keywords that cannot be enforced during generation are checked afterwards"""

    refused: ClassVar[dict[str, Refused]] = {
        "json_schema": Refused((), "put its name, schema and strict beside type")
    }


class ResponsesText(Body):
    """Format and verbosity of the answer's text."""

    format: ResponsesTextFormat | None = None
    """see below"""
    verbosity: Literal["low", "medium", "high"] | None = None
    """repeated in the response"""


class ResponsesReasoning(Body):
    """Reasoning effort and summary."""

    effort: str | None = None
    """passed to chat templates that support it; none: enable_thinking false"""
    summary: str | None = None
    """repeated in the response"""

    accepted: ClassVar[dict[str, str]] = {
        "generate_summary": "reasoning is returned in full",
        "context": "the chat template selects which earlier reasoning the model sees",
        "mode": _HINT,
    }


class InputTokensBody(ModelBody):
    """Request body of ``POST /v1/responses/input_tokens``: the fields that determine the prompt."""

    input: str | Annotated[list[ResponsesItem], FIRST_FAULT] | None = None
    """text, or items"""
    instructions: str | None = None
    """system message before the conversation"""
    previous_response_id: str | None = None
    """response whose conversation precedes the input"""
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None
    """up to 512"""
    tool_choice: Literal["none", "auto", "required", "any"] | ResponsesToolChoice | None = None
    """none, auto, required, any (same as required), a tool, allowed_tools"""
    parallel_tool_calls: bool | None = None
    """false: at most one call"""
    text: ResponsesText | None = None
    """see below"""
    reasoning: ResponsesReasoning | None = None
    """see below"""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drops as many of the first turns as necessary"""

    refused: ClassVar[dict[str, Refused]] = {
        "conversation": Refused((None,), "send previous_response_id, or all items as input"),
        "response_format": Refused((), "use text.format"),
        "stop": Refused((), "use /v1/chat/completions"),
    }

    def items(self) -> list[ResponsesItem]:
        """Return the input as a list of items."""
        if isinstance(self.input, str):
            return [ResponsesItem(role="user", content=self.input)]
        return list(self.input or ())

    def opening_after(self, earlier: Sequence[ResponsesItem]) -> str:
        """Return the opening of the conversation, which may begin in a stored response."""
        return opening_of_turns([*earlier, *self.items()])


class ResponsesBody(InputTokensBody):
    """Request body of ``POST /v1/responses``, with Baton's own fields at the end."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """limited to the space that the prompt leaves in the context"""
    temperature: float | None = None
    """0 is greedy"""
    top_p: float | None = None
    """greater than 0, at most 1"""
    top_logprobs: int | None = None
    """0 to 20"""
    include: Annotated[list[str], FIRST_FAULT] | None = None
    """message.output_text.logprobs; other values have no effect"""
    stream: bool | None = None
    """server-sent events"""
    store: bool | None = None
    """false: the response is not stored"""
    metadata: dict[str, str] | None = None
    """repeated in the response"""
    user: str | None = None
    """recorded in traces and in the request report"""
    safety_identifier: str | None = None
    """repeated in the response"""
    prompt_cache_key: str | None = None
    """repeated in the response"""
    prompt_cache_retention: str | None = None
    """time, such as 24h, that its KV stays cached before other KV; in_memory: no longer"""
    service_tier: str | None = None
    """flex: waits behind other requests of the tenant, priority: before them; others: no effect"""
    max_tool_calls: int | None = None
    """repeated in the response"""
    priority: int | None = None
    """Baton's own: requests with lower values run first"""
    seed: int | None = None
    """Baton's own: requests with equal seeds get equal answers"""
    cache_salt: str | None = None
    """Baton's own: only requests with the same salt share cached prefixes"""

    accepted: ClassVar[dict[str, str]] = {
        "client_metadata": "nothing depends on it",
        "prompt_cache_options": "prefixes are cached without keys",
        "stream_options": "events are not padded",
        "image": "applies only to generated images",
        "access_programs": "nothing depends on them",
        "background_options": "applies only to background responses, which are rejected",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "background": Refused(
            (None, False),
            "a response ends with its HTTP call: leave it out, and use stream",
        ),
        "prompt": Refused((None,), "there are no prompt templates: send instructions and input"),
        "context_management": Refused((None, []), "use truncation: auto"),
        "moderation": Refused((None,), "send the text to a moderation model"),
    }

    @property
    def wants_logprobs(self) -> bool:
        """True if the client requests log-probabilities of output tokens."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def keeps(self) -> bool:
        """True if the response is stored, which is OpenAI's default."""
        return self.store is not False

    def opening_after(self, earlier: Sequence[ResponsesItem]) -> str:
        """Return the opening of the conversation: ``user``, or the first message."""
        return self.user or super().opening_after(earlier)
