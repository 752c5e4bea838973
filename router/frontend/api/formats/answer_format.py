"""Interface of response formats, which convert events of an answer to a stream or one body.

    first token of any prompt ── opening
    logprobs of a prompt ─────── prompt_logprobs    before any delta of that prompt
    tokens ───────────────────── delta              the last one of a choice has the finish reason
    silence ──────────────────── keep_alive
    end of all requests ──────── finish, ended      or `failed` after an error

`Answer` (``router/frontend/api/answer.py``) calls these methods. Only `finish` may wait.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from baton.types.errors import BatonError
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import Delta

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"


class AnswerFormat(Protocol):
    """Format of an API's responses. ``prompt`` is the index of a request."""

    keep_alive: bytes  # sent when a stream is silent

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the events before the first delta."""

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> bytes:
        """Return the events with the prompt logprobs, which precede the request's first delta."""
        return b""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Return the events of one delta of one choice."""

    def texts(self, texts: Sequence[str]) -> bytes:
        """Return the events of the only choice of a plain response, one for each text."""
        return b"".join(self.delta(0, Delta(0, text=text)) for text in texts)

    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""

    async def finish(self, active_requests: Sequence[ActiveRequest]) -> None:
        """Prepare the end of the response after all requests have ended without errors."""
        return

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the events after the last delta."""

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return the response in one piece."""


class TextEvent:
    """Encoder of events that differ in one text only. The text of ``sample`` is `SAMPLE`."""

    SAMPLE = (
        "baton text \u2063\u2062\u2064 sample"  # no other field of an event has such characters
    )
    _ENCODED = msgspec.json.encode(SAMPLE)

    def __init__(self, sample: bytes) -> None:
        self._before, placeholder, self._behind = sample.partition(self._ENCODED)
        if not placeholder:
            raise ValueError("the event does not contain the sample text")
        self._between = self._behind + self._before

    def of(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + msgspec.json.encode(text) + self._behind

    def of_each(self, texts: Sequence[str]) -> bytes:
        """Return the events with these texts, at least one."""
        return self._before + self._between.join(map(msgspec.json.encode, texts)) + self._behind


def data_event(payload: dict[str, Any]) -> bytes:
    """Encode a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(name: str, payload: dict[str, Any]) -> bytes:
    """Encode a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(payload)


def usage(active_requests: Iterable[ActiveRequest]) -> dict[str, Any]:
    """Sum up the usage. Cached tokens are prompt tokens that were not computed again."""
    prompt = completion = cached = reasoning = 0
    for active in active_requests:
        prompt += active.record.prompt_tokens
        completion += active.record.completion_tokens
        cached += active.record.cached_tokens
        reasoning += active.record.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
