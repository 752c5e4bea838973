"""The messages of a conversation."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from router.api.bodies.common import FIRST_FAULT, Body, FunctionName, Neutral, NonEmpty, only


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON text."""

    name: FunctionName
    arguments: str


class CalledTool(Body):
    """A call that the assistant made."""

    id: NonEmpty
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST_FAULT] | None = None
    tool_calls: Annotated[list[CalledTool], FIRST_FAULT] | None = None
    tool_call_id: NonEmpty | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    neutral: ClassVar[Neutral] = {
        name: only(None)
        for name in ("refusal", "audio", "function_call", "annotations", "reasoning")
    }

    def text(self) -> str:
        """The content as one string; parts stand on lines of their own."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1), FIRST_FAULT]
