"""Converts the tokens of one choice of a response into what the client receives. Sans-IO.

Runs of tokens go in (``push``), deltas come out (``take``). Most responses are plain text, and most
of their runs have one token. For those there is a fast path (``push_plain``, ``take_texts``).
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from batonpb.common_pb2 import TokenLogprob
from batonpb.decode_pb2 import TokenRun

from baton.text.channels import parser_of
from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import TextTokenizer
from baton.text.tool_calls import CallDelta, ToolCallParser
from baton.wire.tokens import unpack_tokens
from router.request import GenerationRequest


class ShownLogprob(NamedTuple):
    """Log-probability of one token, with the offset of its text in the choice's text."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text_offset: int


@dataclass(slots=True)
class Delta:
    """New content of one choice, since the last write to the client."""

    choice: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # if requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # stop string or token of the client

    @property
    def only_text(self) -> bool:
        """True if only text is new, as for nearly every token."""
        return not (
            self.finish_reason or self.logprobs or self.calls or self.reasoning or self.token_ids
        ) and bool(self.text)


class RunResult(NamedTuple):
    """Result of a run of tokens."""

    fresh_tokens: int = 0
    stopped: bool = False  # by a stop string: the worker must be notified
    gap: bool = False  # tokens are missing: a resume is needed


CUT = ("length", "abort")  # finish reasons of responses that the model did not end

ONE_TOKEN = RunResult(1)  # nearly every run
_MAX_TEXTS = 16  # of waiting tokens that a client gets one by one; more are joined


class ChoiceRecord:
    """Record of one of the ``n`` choices."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: TextTokenizer) -> None:
        self.index = index
        shown = request.shown
        thinking = request.thinking
        calls = request.expected_calls
        tags = calls.special_ids if calls is not None else frozenset[int]()
        if thinking is not None:
            tags |= thinking.syntax.special_ids
        self._detokenizer = Detokenizer(
            tokenizer,
            shown.stops,
            request.sampling.min_tokens,
            stop_text=shown.stop_text,
            special_ids=None if shown.special_tokens else tags,
        )
        self._thinking = parser_of(thinking) if thinking is not None else None
        self._hides_thinking = thinking is not None and not thinking.shown
        self._tools = ToolCallParser(calls) if calls is not None else None
        self._silent = request.prompt_logprobs_only  # its one token is not shown
        self._checked_schema = request.checked_schema
        self._checked_tools = request.checked_tools
        self._arguments: dict[int, tuple[str, str]] = {}  # by call: tool name, arguments
        self._content: list[str] = []  # kept if a complete response is checked
        self.checks: list[tuple[str, str]] = []  # schemas and texts of a complete response
        self._sends_ids = shown.token_ids
        self._sends_stop_token = shown.stop_token
        self._stop_token_ids = request.sampling.stop_token_ids
        self.reasoning_tokens = 0
        self._ids = array("I")  # a list would take nine times the memory of every open stream
        self.next_index = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.completion_tokens = 0
        self._pending = Delta(index)
        self._texts: list[str] = []  # of single tokens, before the pending text
        # Only text can follow, token by token, until the end.
        self.plain = not (
            shown.stops
            or shown.token_ids
            or thinking is not None
            or calls is not None
            or request.checked_schema
            or request.prompt_logprobs_only
            or request.sampling.logprobs is not None
        )

    @property
    def token_ids(self) -> list[int]:
        """All received tokens, as a new list."""
        return self._ids.tolist()

    def push_plain(self, run: TokenRun) -> int:
        """Take new tokens of a plain response; return their number, 0 if `push` must take them."""
        if run.index != self.next_index or run.finish_reason:
            return 0
        ids = unpack_tokens(run.token_ids)
        self._ids.extend(ids)
        self.next_index += len(ids)
        self.completion_tokens += len(ids)
        self._split_off()
        self._texts += filter(None, map(self._detokenizer.push, ids))
        if len(self._texts) > _MAX_TEXTS:
            self._texts = ["".join(self._texts)]
        return len(ids)

    def _split_off(self) -> None:
        if self.plain and self._pending.text:
            self._texts.append(self._pending.text)
            self._pending.text = ""

    def take_texts(self) -> list[str]:
        """Return the new texts of a plain response, one per token; `take` has what follows.

        Texts are joined if the client is far behind.
        """
        texts = self._texts
        self._texts = []
        if self._pending.text and self.finish_reason is None:
            texts.append(self._pending.text)
            self._pending.text = ""
        return texts

    def push(self, run: TokenRun) -> RunResult:
        """Take a run of tokens."""
        if self.finish_reason is not None:
            return RunResult()
        self._split_off()
        if run.index > self.next_index:
            return RunResult(gap=True)
        if self._silent:
            self._end("length", None)
            return RunResult()
        ids = unpack_tokens(run.token_ids)  # without a stop token
        skip = self.next_index - run.index
        fresh = 0
        for offset in range(skip, len(ids)):
            self._push_token(ids[offset], run.logprobs[offset] if run.logprobs else None)
            fresh += 1
            if self._detokenizer.stopped_by is not None:
                self._end("stop", self._detokenizer.stopped_by)
                return RunResult(fresh, stopped=not run.finish_reason)
        if run.finish_reason:
            self.completion_tokens += run.has_stop_token
            self._end(run.finish_reason, None, run.stop_token_id if run.has_stop_token else None)
        return ONE_TOKEN if fresh == 1 else RunResult(fresh)

    def _push_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        offset = self._detokenizer.text_length
        self._ids.append(token_id)
        self.next_index += 1
        self.completion_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._thinking is None:
            self._show_content(text)
        else:
            thought = self._thinking.thinking
            self._show_parts(*self._thinking.push(text))
            self.reasoning_tokens += thought or self._thinking.thinking
        if self._sends_ids:
            self._pending.token_ids.append(token_id)
        if logprob is not None:
            top = zip(unpack_tokens(logprob.top_ids), logprob.top_logprobs, strict=True)
            shown = ShownLogprob(token_id, logprob.logprob, tuple(top), offset)
            self._pending.logprobs.append(shown)

    def abort(self) -> None:
        """End with the tokens received so far."""
        if self.finish_reason is None:
            self._split_off()
            self._end("abort", None)

    def _end(self, reason: str, stop_string: str | None, stop_token: int | None = None) -> None:
        self._show(self._detokenizer.finish(stop_token))
        if self._sends_stop_token and stop_token is not None:
            self._pending.token_ids.append(stop_token)
        if self._thinking is not None:
            self._show_parts(*self._thinking.finish())
        if self._tools is not None:
            self._add(*self._tools.finish(was_cut=reason in CUT))
            if reason == "stop" and self._tools.calls and not self._tools.cut:
                reason = "tool_calls"
        self.finish_reason = self._pending.finish_reason = reason
        self.checks = self._checks(reason)
        # The model's own end token is not reported: the response was complete.
        asked = stop_token if stop_token in self._stop_token_ids else None
        self.stop_reason = self._pending.stop_reason = asked if stop_string is None else stop_string

    def _show(self, text: str) -> None:
        if self._thinking is None:
            self._show_content(text)
        else:
            self._show_parts(*self._thinking.push(text))

    def _show_parts(self, thoughts: str, content: str) -> None:
        if not self._hides_thinking:
            self._pending.reasoning += thoughts
        self._show_content(content)

    def _show_content(self, text: str) -> None:
        if self._tools is None:
            self._pending.text += text
            if self._checked_schema:
                self._content.append(text)
        else:
            self._add(*self._tools.push(text))

    def _checks(self, reason: str) -> list[tuple[str, str]]:
        """Return the texts of a complete response that no grammar enforces, with their schemas."""
        if reason == "stop" and self._checked_schema:
            return [(self._checked_schema, "".join(self._content))]
        if reason != "tool_calls" or not self._checked_tools:
            return []
        called = self._arguments.values()
        tools = self._checked_tools
        return [(tools[name], arguments) for name, arguments in called if name in tools]

    def _add(self, text: str, calls: Iterable[CallDelta]) -> None:
        """Merge the parts of a call into one delta: clients use only one."""
        pending = self._pending
        text_at = len(pending.text)
        pending.text += text
        if self._checked_schema:
            self._content.append(text)
        for call in calls:
            if self._checked_tools:
                name, before = self._arguments.get(call.index, (call.name or "", ""))
                self._arguments[call.index] = (name, before + call.arguments)
            if pending.calls and pending.calls[-1].index == call.index:
                last = pending.calls[-1]
                pending.calls[-1] = replace(last, arguments=last.arguments + call.arguments)
            else:
                at = text_at + (call.text_before or 0)
                shown = len(pending.logprobs)
                pending.calls.append(replace(call, text_before=at, logprobs_before=shown))

    @property
    def has_news(self) -> bool:
        """True if `take` returns a delta."""
        pending = self._pending
        return bool(
            pending.text
            or self._texts
            or pending.finish_reason
            or pending.reasoning
            or pending.calls
            or pending.logprobs
            or pending.token_ids
        )

    def take(self) -> Delta | None:
        """Return what the client has not received, or None. Several steps give one delta."""
        if not self.has_news:
            return None
        pending = self._pending
        self._pending = Delta(self.index)
        if self._texts:
            pending.text = "".join(self._texts) + pending.text
            self._texts = []
        return pending

    def release_payload(self) -> None:
        """Drop data that only a running request needs."""
        self._ids = array("I")
        self._pending = Delta(self.index)
        self._texts = []
        self._content = []
        self._arguments = {}
        self.checks = []
        self._checked_schema = ""
        self._checked_tools = {}
