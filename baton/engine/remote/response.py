"""Responses of engines behind HTTP, without I/O: what all kinds of servers share."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import Annotated

import msgspec

from baton.engine.core.sequence import RequestSpec
from baton.types import events as ev
from baton.types.errors import BatonError, InternalError, InvalidRequestError
from baton.types.params import SampledToken

Count = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]  # as it travels, see baton/wire

_EVENT_BYTES = 8 << 20  # of a stream; one token with 20 alternatives has about 2 KB
_MESSAGE_CHARACTERS = 2000  # of an error, which a client gets and the router keeps


class ErrorBody(msgspec.Struct, frozen=True):
    """Error in a stream or in a response."""

    message: str = ""
    code: int | str | None = None


class _ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody | None = None


def error_of(
    server: str, error: ErrorBody, refused: Container[object], status: int | None = None
) -> BatonError:
    """Return the error that a server reports: of the request, if its code is a ``refused`` one."""
    code = error.code if isinstance(error.code, int) else status
    message = error.message[:_MESSAGE_CHARACTERS]
    if code in refused:
        return InvalidRequestError(f"{server} refused the request: {message}")
    return InternalError(f"{server} failed: {message}")


def error_in(server: str, body: bytes, refused: Container[object], status: int) -> BatonError:
    """Return the error of a response with another status than 200."""
    try:
        error = msgspec.json.decode(body, type=_ErrorResponse).error
    except msgspec.DecodeError:
        error = None
    text = body[:200].decode(errors="replace")
    error = error or ErrorBody(f"it answered with status {status}: {text}")
    return error_of(server, error, refused, status)


class ResponseReader(ABC):
    """Parser of the streamed response for one choice.

    Attributes:
        generated: Tokens of the choice so far, those before a resumption included.
        finished: Whether the choice has its finish reason.
        cached_tokens: Prompt tokens that the server had cached; None until it reports them.
    """

    def __init__(self, request_id: str, choice: int, spec: RequestSpec) -> None:
        emitted = spec.emitted[choice] if spec.emitted else None
        self.generated = len(emitted or ())
        self.finished = False
        self.cached_tokens: int | None = None
        self._request_id = request_id
        self._choice = choice
        self._alternatives = spec.params.logprobs
        self._buffer = b""

    def feed(self, data: bytes) -> list[ev.Tokens]:
        """Return the tokens in received bytes.

        Raises:
            BatonError: The server ended the request with an error, or sent no response.
        """
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        if len(self._buffer) > _EVENT_BYTES:
            raise InternalError(f"the server sent an event of more than {_EVENT_BYTES} bytes")
        return [tokens for event in events for tokens in self._read(event)]

    @abstractmethod
    def _read(self, event: bytes) -> Iterable[ev.Tokens]:
        """Return the tokens in one event."""

    def _new(self, tokens: Sequence[SampledToken], reason: str, stop: int | None) -> ev.Tokens:
        """Return the next tokens, which end the choice if there is a ``reason``."""
        if self.finished:
            raise InternalError("the server sent tokens behind the end of a response")
        index = self.generated
        self.generated += len(tokens)
        self.finished = bool(reason)
        return ev.Tokens(
            request_id=self._request_id,
            choice=self._choice,
            index=index,
            tokens=tuple(tokens),
            finish_reason=reason,
            stop_token=stop,
        )
