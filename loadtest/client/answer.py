"""Parser of a streamed response. Does no I/O.

POST /v1/chat/completions ─▶ HTTP head ─▶ "data: {…}" events ─▶ "data: [DONE]"
"""

from collections.abc import Iterable
from typing import Any

import httptools
import msgspec

from loadtest.client.records import End

_MAX_ERROR_BYTES = 65_536
_MAX_DETAIL = 300


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class ToolCall(msgspec.Struct):
    """Call of a tool; ``arguments`` is JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPart] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # chat
    text: str | None = None  # completion
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class AnswerReader:
    """Incremental parser of one response, which can collect its text and tool calls."""

    def __init__(self, *, keep_text: bool) -> None:
        self.status = 0
        self.request_id = ""
        self.retry_after = ""
        self.chunk_s: list[float] = []
        self.finish_reason = ""
        self.usage = _Usage()
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._parser = httptools.HttpResponseParser(self)
        self._events = msgspec.json.Decoder(_Event)
        self._line = b""
        self._error_body = b""
        self._complete = False  # the HTTP message is complete
        self._done = False  # [DONE] was received
        self._failure: tuple[End, str] | None = None
        self._now_s = 0.0

    @property
    def ended(self) -> bool:
        """True if nothing more is expected, so that the client may close the connection."""
        return self._complete or self._done or self._failure is not None

    @property
    def text(self) -> str:
        """Text of the response so far."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls of the response so far."""
        return list(self._calls.values())

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse bytes that arrived at ``now_s``."""
        self._now_s = now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken_stream" if self.status else "connection", f"not HTTP: {error}")

    def outcome(self, lost: str = "") -> tuple[End, str]:
        """Return how the request ended, after the connection is closed.

        Args:
            lost: Reason for the loss of the connection, or "".

        Returns:
            The end and, unless it is "ok", a detail for people.
        """
        if self._failure is not None:
            return self._failure
        if self.status == 0:
            return "connection", lost or "closed before it answered"
        if self.status != 200:
            return "http_error", self._error_detail()
        if self._done or (self._complete and self.finish_reason):
            return "ok", ""
        return "broken_stream", lost or "the stream ended before the response was complete"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header of the response."""
        if name.lower() == b"x-request-id":
            self.request_id = value.decode("latin-1")
        elif name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Process the end of the headers."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Process a part of the body, after chunked decoding."""
        if self.status != 200:
            self._error_body = (self._error_body + body)[:_MAX_ERROR_BYTES]
            return
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_message_complete(self) -> None:
        """Process the end of the HTTP message."""
        self._complete = True

    def _take(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        try:
            event = self._events.decode(payload)
        except msgspec.DecodeError as error:
            self._fail("broken_stream", f"unreadable event: {error}")
            return
        if event.error is not None:
            self._fail("stream_error", _detail_of(event.error))
            return
        self.request_id = self.request_id or event.id or ""
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self._take_choice(choice)

    def _take_choice(self, choice: _Choice) -> None:
        text = choice.text or ""
        delta = choice.delta
        has_content = bool(text)
        if delta is not None:
            text = delta.content or ""
            thought = delta.reasoning_content or delta.reasoning
            has_content = bool(text or thought or delta.tool_calls)
        if has_content:
            self.chunk_s.append(self._now_s)
            if self._keep_text:
                self._texts.append(text)
                self._collect(delta.tool_calls or () if delta else ())
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason

    def _collect(self, parts: Iterable[_CallPart]) -> None:
        for part in parts:
            call = self._calls.setdefault(part.index, ToolCall())
            call.id = call.id or part.id or ""
            call.name += part.function.name or ""
            call.arguments += part.function.arguments or ""

    def _fail(self, end: End, detail: str) -> None:
        if self._failure is None:
            self._failure = end, detail[:_MAX_DETAIL]

    def _error_detail(self) -> str:
        try:
            body = msgspec.json.decode(self._error_body)
        except msgspec.DecodeError:
            return self._error_body.decode("utf-8", "replace")[:_MAX_DETAIL]
        error = body.get("error", body) if isinstance(body, dict) else body
        return _detail_of(error)[:_MAX_DETAIL]


def _detail_of(error: object) -> str:
    if not isinstance(error, dict):
        return str(error)
    kind = error.get("code") or error.get("type") or ""
    return f"{kind}: {error.get('message', '')}".strip(": ")
