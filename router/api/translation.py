"""Another API's body as a chat: one parser checks it, and its errors name the caller's fields."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from engine.core.errors import InvalidRequestError
from router.api.bodies.chat import ChatBody
from router.api.bodies.parse import parse
from router.request import GenerationRequest

_MESSAGE = re.compile(r"messages\[(\d+)\]")


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
            return parse(ChatBody, orjson.dumps(self.fields))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let what is refused inside name the caller's fields."""
        try:
            yield
        except InvalidRequestError as error:
            if error.param is not None:
                param = self._renamed(error.param)
                error.message = error.message.replace(error.param, param)
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
