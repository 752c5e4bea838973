"""Another API's body as a chat: one parser checks it, and its errors name the caller's fields."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.parse import checked
from router.request import GenerationRequest

_MESSAGE = re.compile(r"messages\[(\d+)\]")


class Conversation:
    """The messages of a chat, and of each where the caller wrote it.

    Args:
        joins: Roles whose texts that follow each other become one message.
    """

    def __init__(self, joins: Collection[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._joins = joins
        self._thoughts: list[str] = []  # of the assistant's message that is to come

    def say(self, role: str, text: str, where: str) -> None:
        """Text of one side."""
        last = self.messages[-1] if self.messages else {}
        joins = last.get("role") == role and role in self._joins
        if joins and "tool_calls" not in last and not self._thoughts:
            said = last["content"]
            if isinstance(said, list):
                said.append(text)
            else:
                last["content"] = [said, text] if said else text  # a chat joins them as lines
        else:
            self._append({"role": role, "content": text}, where)

    def think(self, text: str) -> None:
        """What the assistant thought before its next message."""
        self._thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: str, where: str) -> None:
        """A call that the assistant made; it belongs to the text before it."""
        function = {"name": name, "arguments": arguments}
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thoughts:
            last = self._append({"role": "assistant", "content": ""}, where)
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, where: str) -> None:
        """What a call gave."""
        self._append({"role": "tool", "tool_call_id": call_id, "content": text}, where)

    def _append(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        if message["role"] == "assistant" and self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        self._thoughts = []
        self.messages.append(message)
        self.places.append(where)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A chat that says what another API's body says.

    Attributes:
        fields: The body of the chat.
        places: Of each message, where the caller wrote it.
        names: The chat's names of other fields to the caller's; a name may be a regular expression.
    """

    fields: dict[str, Any]
    places: Sequence[str]
    names: Mapping[str, str]

    def chat(self) -> ChatBody:
        """The checked body of the chat.

        Raises:
            InvalidRequestError: Something is wrong with it; names the caller's field.
        """
        with self.named():
            return checked(ChatBody, self.fields)

    def turns(self) -> list[int]:
        """Where the turns of the conversation begin, each with what the user said."""
        messages = self.fields["messages"]
        return [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]

    def from_turn(self, first: int) -> "Translation":
        """The same without what stands before message ``first``, save for what the system said."""
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
        """Let what is refused inside name the caller's fields."""
        try:
            yield
        except InvalidRequestError as error:
            if error.param is not None:
                param = self._renamed(error.param)
                error.message = error.message.replace(error.param, param, 1)
                error.param = param
            raise

    def _renamed(self, param: str) -> str:
        found = _MESSAGE.match(param)
        if found is not None and int(found[1]) < len(self.places):
            return self.places[int(found[1])]
        for name, theirs in self.names.items():
            renamed, count = re.subn(f"^{name}", theirs, param)
            if count:
                return renamed
        return param


def as_answer(
    request: GenerationRequest, *, answer_id: str, most_tokens: int | None
) -> GenerationRequest:
    """A chat's request under another API's name, and with its limit.

    Args:
        request: That may fill the context.
        answer_id: Its new name.
        most_tokens: The answer's limit; one that is beyond the context is no error.
    """
    room = request.sampling.max_tokens
    limit = room if most_tokens is None else min(most_tokens, room)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=limit)
    return replace(request, request_id=answer_id, sampling=sampling)
