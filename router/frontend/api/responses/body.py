"""Bodies of the Responses API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, ModelBody, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS, Fields, Refused

_NO_TEXT = "of images and files, which are refused where they stand"
_HINT = "a hint about speed or price; every request is served alike"


class ResponsesPart(Body):
    """A part of an item's content."""

    type: NonEmpty
    """input_text, output_text, text, refusal, reasoning_text, summary_text"""
    text: str | None = None
    """parts stand on lines of their own"""
    refusal: str | None = None
    """as text"""

    others = Fields(
        accepted={
            "annotations": "no part of the text",
            "logprobs": "no part of the text",
            "parsed": "the text, parsed by the client",
            "prompt_cache_breakpoint": "prefixes are found without a mark",
            "image_url": _NO_TEXT,
            "detail": _NO_TEXT,
            "file_id": _NO_TEXT,
            "file_url": _NO_TEXT,
            "file_data": _NO_TEXT,
            "filename": _NO_TEXT,
            "input_audio": _NO_TEXT,
        },
    )


class ResponsesItem(Body):
    """An item of a conversation; which fields it has depends on its type."""

    type: NonEmpty = "message"
    """message, function_call, function_call_output, item_reference, reasoning"""
    id: str | None = None
    """of an item_reference: the item of a kept response"""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    """of a message: user, assistant, system, developer (as system)"""
    content: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """of a message or of reasoning: text, or parts of text"""
    status: str | None = None
    """kept with it"""
    call_id: NonEmpty | None = None
    """of a call and of its output"""
    name: NonEmpty | None = None
    """of a call"""
    arguments: str | None = None
    """of a call"""
    output: str | Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """of a call: text, or parts of text"""
    summary: Annotated[list[ResponsesPart], FIRST_FAULT] | None = None
    """of reasoning without content"""

    others = Fields(
        accepted={
            "phase": "no part of the text",
            "encrypted_content": "of reasoning, which nobody here can read",
            "caller": "no part of the call",
            "namespace": "no part of the call",
            "async": "no part of the call",
            "parsed_arguments": "the arguments, parsed by the client",
            "created_by": "no part of the text",
        },
    )


class ResponsesFunction(Body):
    """A function that may be called."""

    type: NonEmpty
    """function"""
    name: NonEmpty | None = None
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; calls keep to it"""
    strict: bool | None = None
    """false: keywords that cannot be enforced are checked afterwards"""

    others = Fields(
        accepted={
            "allowed_callers": "only the model calls",
            "defer_loading": "every tool is told at once",
            "output_schema": "not shown to the model",
        },
    )


class ResponsesFunctionName(Body):
    """A function, by its name."""

    type: NonEmpty
    """function"""
    name: NonEmpty | None = None
    """of a tool"""


class ResponsesToolChoice(ResponsesFunctionName):
    """The function that must be called; or, with ``allowed_tools``, those that may be."""

    type: NonEmpty
    """function, allowed_tools"""
    mode: Literal["auto", "required"] | None = None
    """of allowed_tools: auto, required"""
    tools: list[ResponsesFunctionName] | None = None
    """of allowed_tools; the model is told of all"""


class ResponsesTextFormat(Body):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    """text, json_object, json_schema"""
    name: str | None = None
    """repeated in the response"""
    description: str | None = None
    """repeated in the response"""
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """the answer keeps to it"""
    strict: bool | None = None
    """false: keywords that cannot be enforced are checked afterwards"""


class ResponsesText(Body):
    """What the answer's text is to look like."""

    format: ResponsesTextFormat | None = None
    """see below"""
    verbosity: Literal["low", "medium", "high"] | None = None
    """repeated in the response"""


class ResponsesReasoning(Body):
    """How much the model is to think."""

    effort: str | None = None
    """given to a template that knows it; none: enable_thinking false"""
    summary: str | None = None
    """repeated in the response"""

    others = Fields(
        accepted={
            "generate_summary": "thinking is told as it is",
            "context": "a template says which earlier reasoning is read",
            "mode": _HINT,
        },
    )


class InputTokensBody(ModelBody):
    """``POST /v1/responses/input_tokens``: a response without what its answer is to be."""

    input: str | Annotated[list[ResponsesItem], FIRST_FAULT] | None = None
    """a text, or items"""
    instructions: str | None = None
    """before all that was said"""
    previous_response_id: str | None = None
    """its conversation stands before the input"""
    tools: Annotated[list[ResponsesFunction], Field(max_length=MAX_TOOLS)] | None = None
    """up to 512"""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    """none, auto, required, a function, allowed_tools"""
    parallel_tool_calls: bool | None = None
    """false: one call at most"""
    text: ResponsesText | None = None
    """see below"""
    reasoning: ResponsesReasoning | None = None
    """see below"""
    truncation: Literal["auto", "disabled"] | None = None
    """auto leaves the first turns out, as few as possible"""

    others = Fields(
        refused={
            "conversation": Refused((None,), "send previous_response_id, or all items as input"),
        },
    )


class ResponsesBody(InputTokensBody):
    """``POST /v1/responses``. ``priority``, ``seed`` and ``cache_salt`` are not OpenAI's."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """may be beyond the context, which then is the limit"""
    temperature: float | None = None
    """0 is greedy"""
    top_p: float | None = None
    """over 0, at most 1"""
    top_logprobs: int | None = None
    """0 to 20"""
    include: list[str] | None = None
    """message.output_text.logprobs; other values change nothing"""
    stream: bool | None = None
    """server-sent events"""
    store: bool | None = None
    """false: the response is not kept"""
    metadata: dict[str, str] | None = None
    """repeated in the response"""
    user: str | None = None
    """stands in traces and in the request's story"""
    safety_identifier: str | None = None
    """repeated in the response"""
    prompt_cache_key: str | None = None
    """repeated in the response"""
    max_tool_calls: int | None = None
    """repeated in the response"""
    priority: int | None = None
    """Baton's own: lower goes first"""
    seed: int | None = None
    """Baton's own: equal seeds give equal answers"""
    cache_salt: str | None = None
    """Baton's own: shares a cached prefix only with the same salt"""

    others = Fields(
        accepted={
            "service_tier": _HINT,
            "prompt_cache_retention": "prefixes stay for as long as there is room",
            "prompt_cache_options": "prefixes are found without a key",
            "stream_options": "nothing is padded",
            "image": "of images, which are refused where they stand",
            "access_programs": "nothing depends on them",
            "background_options": "of responses in the background, which are refused",
        },
        refused={
            "background": Refused(
                (None, False),
                "a response lasts as long as its call, so that none outlives the router that "
                "has it: leave it out, and stream",
            ),
            "prompt": Refused(
                (None,), "there are no prompt templates: send instructions and input"
            ),
            "context_management": Refused((None, []), "use truncation: auto"),
            "moderation": Refused((None,), "ask a model that moderates"),
        },
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to have log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def keeps(self) -> bool:
        """Whether the response is to be kept: unless said otherwise, as OpenAI does."""
        return self.store is not False
