"""The messages of a conversation. What is replayed is taken as it comes, whoever wrote it."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import FIRST_FAULT, Body, NonEmpty


class Part(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    others = parameters.PART

    def shown(self) -> str:
        """What the model reads of it as content."""
        if self.type == "thinking":
            return ""
        return self.text or self.refusal or ""


class CalledFunction(Body):
    """The function of a call. Its arguments may be of any form: a model wrote them."""

    name: NonEmpty
    arguments: str | dict[str, Any] | None = None

    others = parameters.CALLED_FUNCTION


class CalledTool(Body):
    """A call that the assistant made."""

    id: NonEmpty | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    others = parameters.CALL


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part | str], FIRST_FAULT] | None = None
    tool_calls: Annotated[list[CalledTool], FIRST_FAULT] | None = None
    tool_call_id: NonEmpty | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    others = parameters.MESSAGE

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
