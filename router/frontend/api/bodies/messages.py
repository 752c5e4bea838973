"""The messages of a conversation. What is replayed is taken as it comes, whoever wrote it."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies.common import FIRST_FAULT, Body, NonEmpty
from router.frontend.api.bodies.fields import Fields, Refused

_TEXT_ONLY = "this model reads and writes text only"


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    """text, input_text, output_text, refusal; thinking is reasoning"""
    text: str | None = None
    """parts stand on lines of their own"""
    refusal: str | None = None
    """as text"""
    thinking: str | None = None
    """as reasoning_content"""

    others = Fields(
        accepted={
            "cache_control": "prefixes are found without a mark",
            "annotations": "no part of the text",
            "logprobs": "no part of the text",
            "signature": "no part of the text",
            "id": "no part of the text",
            "index": "the order is that of the list",
        },
    )

    def shown(self) -> str:
        """What the model reads of it as content."""
        if self.type == "thinking":
            return ""
        return self.text or self.refusal or ""


class CalledFunction(Body):
    """The function of a call. Its arguments may be of any form: a model wrote them."""

    name: NonEmpty
    """any text"""
    arguments: str | dict[str, Any] | None = None
    """any text; empty is `{}`; or an object"""

    others = Fields(
        accepted={
            "parsed_arguments": "the arguments, parsed by the client",
            "provider_specific_fields": "no part of the call",
        },
    )


class CalledTool(Body):
    """A call that the assistant made."""

    id: NonEmpty | None = None
    """results name it"""
    type: Literal["function"] = "function"
    """function"""
    function: CalledFunction
    """name and arguments"""

    others = Fields(
        accepted={
            "index": "the order is that of the list",
            "provider_specific_fields": "no part of the call",
            "extra_content": "no part of the call",
            "cache_control": "prefixes are found without a mark",
        },
    )


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """system, developer (as system where the template has none), user, assistant, tool"""
    content: str | Annotated[list[Part | str], FIRST_FAULT] | None = None
    """text, or parts of text"""
    tool_calls: Annotated[list[CalledTool], FIRST_FAULT] | None = None
    """of an assistant"""
    tool_call_id: NonEmpty | None = None
    """of a tool's result"""
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    """given to the chat template, which may show it"""
    refusal: str | None = None
    """the text of a message without content"""
    reasoning_content: str | None = None
    """given to a template that shows earlier reasoning"""
    reasoning: str | None = None
    """as reasoning_content"""

    others = Fields(
        accepted={
            "annotations": "no part of the text",
            "parsed": "the content, parsed by the client",
            "id": "messages have no names here",
            "index": "the order is that of the list",
            "type": "every item is a message",
            "status": "no part of the text",
            "created_at": "no part of the text",
            "cache_control": "prefixes are found without a mark",
            "provider_specific_fields": "no part of the text",
            "reasoning_details": "see reasoning_content",
            "thinking_blocks": "see reasoning_content",
            "images": "empty, or of another model",
            "token_ids": "the text counts",
        },
        refused={
            "function_call": Refused((None,), "use tool_calls"),
            "audio": Refused((None,), _TEXT_ONLY),
            "prefix": Refused((None, False), "use continue_final_message"),
            "partial": Refused((None, False), "use continue_final_message"),
        },
    )

    def text(self) -> str:
        """The content as one string; parts stand on lines of their own."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        parts = (part if isinstance(part, str) else part.shown() for part in self.content)
        hidden = [isinstance(part, Part) and part.type == "thinking" for part in self.content]
        return "\n".join(text for text, hide in zip(parts, hidden, strict=True) if not hide)

    def thoughts(self) -> str:
        """The reasoning that came before the content."""
        said = self.reasoning_content or self.reasoning
        if said is not None or not isinstance(self.content, list):
            return said or ""
        parts = (part.thinking for part in self.content if isinstance(part, Part))
        return "\n".join(text for text in parts if text)


Messages = Annotated[list[Message], Field(min_length=1), FIRST_FAULT]
