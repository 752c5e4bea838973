"""Translation of other APIs' bodies to chats; errors name the fields of the original body."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.parse import checked
from router.request import GenerationRequest

Content = str | list[Any]
"""Text, or texts and images."""

_Value = TypeVar("_Value")
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_PART = re.compile(r"\.content\[(\d+)\]")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.(?:function|custom)\b)?")


class TranslatedConversation:
    """Builder of a chat's messages, which records the original path of each message.

    Consecutive texts of a role in ``joins`` become one message.
    """

    def __init__(self, joins: Collection[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.image_places: dict[int, str] = {}
        self._joins = joins
        self.thoughts: list[str] = []  # of the assistant's next message

    def content(self, parts: list[Any]) -> Content:
        """Return the content that consists of texts, and of images as returned by `image`."""
        return parts if any(isinstance(part, dict) for part in parts) else "\n".join(parts)

    def image(self, url: str, where: str) -> dict[str, Any]:
        """Return a part of a message that is an image."""
        part = {"type": "image_url", "image_url": {"url": url}}
        self.image_places[id(part)] = where
        return part

    def add_text(self, role: str, text: Content, where: str) -> None:
        """Add a text of one role, or texts and images."""
        last = self.messages[-1] if self.messages else {}
        joins = last.get("role") == role and role in self._joins
        if joins and "tool_calls" not in last and not self.thoughts:
            if not isinstance(last["content"], list):
                last["content"] = [last["content"]] if last["content"] else []
            last["content"] += [text] if isinstance(text, str) else text  # a chat joins texts
        else:
            self._append({"role": role, "content": text}, where)

    def add_call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        """Add a call of the assistant to the text before it."""
        function = {"name": name, "arguments": arguments}
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self.thoughts:
            last = self._append({"role": "assistant", "content": ""}, where)
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, text: Content, where: str) -> None:
        """Add the result of a call."""
        self._append({"role": "tool", "tool_call_id": call_id, "content": text}, where)

    def drop_empty_end(self) -> None:
        """Remove a last message of the assistant that has neither text nor calls."""
        last = self.messages[-1] if self.messages else {}
        is_empty = not any(last.get("content", "")) and "tool_calls" not in last
        if last.get("role") == "assistant" and is_empty:
            self.messages.pop()
            self.places.pop()

    def _append(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        if message["role"] == "assistant" and self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        self.thoughts = []
        self.messages.append(message)
        self.places.append(where)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A chat that is equivalent to another API's body.

    Attributes:
        fields: The body of the chat.
        places: Path of each message in the original body.
        names: Field of the chat (a regular expression) to the field of the original body.
        tool_places: Path of each tool in the original body.
        image_places: Path of each image in it, by the id of its part.
    """

    fields: dict[str, Any]
    places: Sequence[str]
    names: Mapping[str, str]
    tool_places: Sequence[str] = ()
    image_places: Mapping[int, str] = field(default_factory=dict)

    def chat(self) -> ChatBody:
        """Return the validated body of the chat. Errors name the original fields."""
        with self.named():
            return checked(ChatBody, self.fields)

    def turns(self) -> list[int]:
        """Return the indexes of the user's messages, which begin the turns."""
        messages = self.fields["messages"]
        return [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]

    def from_turn(self, first: int) -> "Translation":
        """Return a copy without the messages before ``first``, except system messages."""
        kept = [
            (message, place)
            for i, (message, place) in enumerate(
                zip(self.fields["messages"], self.places, strict=True)
            )
            if i >= first or message["role"] == "system"
        ]
        fields = {**self.fields, "messages": [message for message, _ in kept]}
        return replace(self, fields=fields, places=[place for _, place in kept])

    @contextmanager
    def named(self) -> Iterator[None]:
        """Rename the field in errors raised inside the context to the original one."""
        try:
            yield
        except InvalidRequestError as error:
            if error.param is not None:
                param = self._renamed(error.param)
                error.message = error.message.replace(error.param, param, 1)
                error.param = param
            raise

    def _renamed(self, param: str) -> str:
        message = _MESSAGE.match(param)
        if message is not None and int(message[1]) < len(self.places):
            inner = param[message.end() :]  # known, or of the item of which the place is
            if (part := _PART.match(inner)) is not None:
                content = self.fields["messages"][int(message[1])]["content"]
                image = content[int(part[1])] if isinstance(content, list) else content
                if id(image) in self.image_places:
                    return self.image_places[id(image)]
            renamed = self._theirs(inner)
            return self.places[int(message[1])] + (renamed if renamed != inner else "")
        tool = _TOOL.match(param)
        if tool is not None and int(tool[1]) < len(self.tool_places):
            param = self.tool_places[int(tool[1])] + param[tool.end() :]
        return self._theirs(param)

    def _theirs(self, param: str) -> str:
        for name, theirs in self.names.items():
            renamed, count = re.subn(f"^{name}", theirs, param)
            if count:
                return renamed
        return param


def required(value: _Value | None, param: str) -> _Value:
    """Return the value of a field that must be there."""
    if value is None:
        raise InvalidRequestError.at(param, "is required")
    return value


def as_answer(
    request: GenerationRequest, *, answer_id: str, most_tokens: int | None
) -> GenerationRequest:
    """Return a chat's request with another id and with the limit ``most_tokens``.

    A limit beyond the context is reduced to the space that ``request`` allows.
    """
    room = request.sampling.max_tokens
    limit = room if most_tokens is None else min(most_tokens, room)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=limit)
    return replace(request, request_id=answer_id, sampling=sampling)
