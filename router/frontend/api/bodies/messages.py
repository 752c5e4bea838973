"""Messages of a conversation. Earlier output of any model is accepted as input."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from router.frontend.api.bodies.common import FIRST_FAULT, Body, NonEmpty, missing_here
from router.frontend.api.bodies.fields import Refused

_TEXT_ONLY = "this model supports text only"


class ImageUrl(Body):
    """Image of a message's content."""

    url: NonEmpty
    """`data:` URL with base64, or a URL of a host in `clients: {images: {hosts}}`"""

    accepted: ClassVar[dict[str, str]] = {"detail": "the model's processor sets the resolution"}


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "image_url"]
    """text, input_text, output_text, refusal, image_url; thinking is reasoning"""
    image_url: NonEmpty | ImageUrl | None = None
    """an image, for models that vLLM serves with images; required for type image_url"""
    text: str | None = None
    """each part is placed on its own line; required for a text type"""
    refusal: str | None = None
    """same as text; required for type refusal"""
    thinking: str | None = None
    """same as reasoning_content; required for type thinking"""

    accepted: ClassVar[dict[str, str]] = {
        "cache_control": "prefixes are cached without markers",
        "annotations": "not part of the text",
        "logprobs": "not part of the text",
        "signature": "not part of the text",
        "id": "not part of the text",
        "index": "the order is that of the list",
    }

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        name = self.type if self.type in ("refusal", "thinking", "image_url") else "text"
        if getattr(self, name) is None:
            raise missing_here(name)
        return self

    @property
    def image(self) -> str:
        """URL of the image; empty for texts."""
        given = self.image_url if self.type == "image_url" else None
        return given.url if isinstance(given, ImageUrl) else given or ""

    def shown(self, image: str = "") -> str:
        """Return the text that is part of the message's content; ``image`` stands for an image."""
        if self.type == "thinking":
            return ""
        if self.type == "image_url":
            return image
        return (self.refusal if self.type == "refusal" else self.text) or ""


class CalledFunction(Body):
    """Function of a call. Its arguments may have any form, because a model generated them."""

    name: NonEmpty
    """any text"""
    arguments: str | dict[str, Any] | None = None
    """any text (empty text is `{}`), or an object"""

    accepted: ClassVar[dict[str, str]] = {
        "parsed_arguments": "the arguments, parsed by the client",
        "provider_specific_fields": "not part of the call",
    }


class CalledCustom(Body):
    """Custom tool of a call."""

    name: NonEmpty
    """any text"""
    input: str = ""
    """any text"""


class CalledTool(Body):
    """A call that the assistant made."""

    id: NonEmpty | None = None
    """id that the result refers to"""
    type: Literal["function", "custom"] = "function"
    """function, custom"""
    function: CalledFunction | None = None
    """name and arguments of a function"""
    custom: CalledCustom | None = None
    """name and input of a custom tool"""

    accepted: ClassVar[dict[str, str]] = {
        "index": "the order is that of the list",
        "provider_specific_fields": "not part of the call",
        "extra_content": "not part of the call",
        "cache_control": "prefixes are cached without markers",
    }


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """system, developer (system if the template has none), user, assistant, tool, function"""
    content: str | Annotated[list[Part | str], FIRST_FAULT] | None = None
    """text, or parts of text"""
    tool_calls: Annotated[list[CalledTool], FIRST_FAULT] | None = None
    """calls that the assistant made"""
    function_call: CalledFunction | None = None
    """call of the old API"""
    tool_call_id: NonEmpty | None = None
    """id of the call that this message is the result of"""
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    """passed to the chat template"""
    refusal: str | None = None
    """text of a message that has no content"""
    reasoning_content: str | None = None
    """passed to chat templates that include earlier reasoning"""
    reasoning: str | None = None
    """same as reasoning_content"""

    accepted: ClassVar[dict[str, str]] = {
        "annotations": "not part of the text",
        "parsed": "the content, parsed by the client",
        "id": "message ids are not used",
        "index": "the order is that of the list",
        "type": "all items are messages",
        "status": "not part of the text",
        "created_at": "not part of the text",
        "cache_control": "prefixes are cached without markers",
        "provider_specific_fields": "not part of the text",
        "reasoning_details": "see reasoning_content",
        "thinking_blocks": "see reasoning_content",
        "images": "empty, or produced by another model",
        "token_ids": "the text is used",
    }
    refused: ClassVar[dict[str, Refused]] = {
        "audio": Refused((None,), _TEXT_ONLY),
        "prefix": Refused((None, False), "use continue_final_message"),
        "partial": Refused((None, False), "use continue_final_message"),
    }

    def text(self, image: str = "") -> str:
        """Return the content as one string, with each part on its own line.

        ``image`` stands for an image.
        """
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        parts = (part if isinstance(part, str) else part.shown(image) for part in self.content)
        hidden = [isinstance(part, Part) and part.type == "thinking" for part in self.content]
        return "\n".join(text for text, hide in zip(parts, hidden, strict=True) if not hide)

    def thoughts(self) -> str:
        """Return the reasoning that precedes the content."""
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None or not isinstance(self.content, list):
            return reasoning or ""
        parts = (part.thinking for part in self.content if isinstance(part, Part))
        return "\n".join(text for text in parts if text)


def images_of(messages: Sequence[Message]) -> Iterator[tuple[Message, str, str]]:
    """Return the images of messages in order: the message, the path of the part, and its URL."""
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, Part) and part.image:
                yield message, f"messages[{index}].content[{place}]", part.image


Messages = Annotated[list[Message], Field(min_length=1), FIRST_FAULT]
