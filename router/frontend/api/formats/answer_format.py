"""What an API makes of the events of an answer: bytes of its stream, or one body.

    first token of any prompt ── opening
    scores of a prompt ───────── prompt_logprobs    before any delta of that prompt
    tokens ───────────────────── delta              the last one of a choice says how it ended
    silence ──────────────────── keep_alive
    all have ended ───────────── finish, ended      or `failed`, where an error ends them

`Answer` (``router/frontend/api/answer.py``) has the events. A format has no clock; only `finish`
may wait.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import orjson

from baton.types.errors import BatonError
from router.routing.choice import Delta
from router.routing.requests.active_request import ActiveRequest

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"


class AnswerFormat(Protocol):
    """How an API writes an answer. ``prompt`` is the index of a request.

    Attributes:
        keep_alive: Written into a stream that has been silent.
    """

    keep_alive: bytes

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Events before the first delta."""

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> bytes:
        """Events with the prompt logprobs, where asked for; ahead of the request's first delta."""

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Events of one delta of one choice."""

    def failed(self, error: BatonError) -> bytes:
        """The last event of a stream that ends with an error."""

    async def finish(self, active_requests: Sequence[ActiveRequest]) -> None:
        """Every request has ended well, and nothing of the end is written yet."""

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Events after the last delta."""

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The answer in one piece."""


class ChunkFormat(Protocol):
    """A format whose stream is a row of objects of one kind, as OpenAI's older ones are."""

    def opening(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Chunks before the first delta."""

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """Chunks with the prompt logprobs, where asked for; ahead of the request's first delta."""

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """One delta of one choice."""

    def usage_chunk(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The last chunk, when the client asked for usage."""

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """The answer in one piece."""


class DataEvents:
    """The stream of a `ChunkFormat`: a ``data:`` line each, ``[DONE]`` at the end.

    Args:
        chunks: What the objects are.
        include_usage: The stream ends with its usage.
        continuous_usage: And every chunk tells of the usage so far.
    """

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(
        self, chunks: ChunkFormat, *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        self._chunks = chunks
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._active_requests: Sequence[ActiveRequest] = ()
        self._around: dict[tuple[int, int], TextEvent] = {}  # by prompt and choice

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """See `AnswerFormat`."""
        self._active_requests = active_requests
        return b"".join(map(self._event, self._chunks.opening(active_requests)))

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> bytes:
        """See `AnswerFormat`."""
        return b"".join(map(data_event, self._chunks.prompt_logprobs(prompt, active)))

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """See `AnswerFormat`."""
        if self._continuous_usage or not delta.only_text:
            return self._event(self._chunks.chunk(prompt, delta))
        place = (prompt, delta.choice)
        event = self._around.get(place)
        if event is None:
            sample = Delta(delta.choice, text=TextEvent.SAMPLE)
            event = self._around[place] = TextEvent(data_event(self._chunks.chunk(prompt, sample)))
        return event.of(delta.text)

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage(self._active_requests)
        return data_event(chunk)

    def failed(self, error: BatonError) -> bytes:
        """See `AnswerFormat`."""
        return data_event(error.body())

    async def finish(self, active_requests: Sequence[ActiveRequest]) -> None:
        """See `AnswerFormat`."""

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """See `AnswerFormat`."""
        if not self._include_usage:
            return DONE
        return data_event(self._chunks.usage_chunk(active_requests)) + DONE

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """See `AnswerFormat`."""
        return self._chunks.whole(active_requests)


class TextEvent:
    """Events that differ in one text alone: the bytes around it are made once.

    Args:
        sample: The event whose text is `SAMPLE`.
    """

    SAMPLE = (
        "baton text \u2063\u2062\u2064 sample"  # no other field of an event has such characters
    )
    _ENCODED = orjson.dumps(SAMPLE)

    def __init__(self, sample: bytes) -> None:
        self._before, found, self._behind = sample.partition(self._ENCODED)
        if not found:
            raise ValueError("the sample's text is not in it")

    def of(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + orjson.dumps(text) + self._behind


def data_event(payload: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named_event(name: str, payload: dict[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(payload)


def usage(active_requests: Iterable[ActiveRequest]) -> dict[str, Any]:
    """Tokens read and written. Cached ones are prompt tokens that were not computed for this."""
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
