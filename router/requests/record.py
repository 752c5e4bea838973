"""The record of one request: what was emitted, what may be shown, how it ended. Sans-IO.

Frames of the worker go in (``on_run``, ``on_route``, ``fail`` …), text and the end come out
(``take``). An emitted token is never taken back: from this record alone the answer can go on.

    received ── index 0 … ── next_index      duplicates below are dropped, a hole asks for a resume
    shown    ── pending ── held              pending waits for the client, held for a stop string
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
from batonpb import common_pb2
from batonpb.common_pb2 import TokenLogprob
from batonpb.decode_pb2 import Emitted, RequestRoute, RequestTimes, TokenRun

from engine.core.errors import BatonError, InternalError
from engine.core.prompt_outputs import PromptLogprobs, PromptLogprobsIntake
from engine.text.detokenizer import Detokenizer
from engine.text.reasoning import ReasoningParser
from engine.text.schema_check import violations
from engine.text.tokenizer import TextTokenizer
from engine.text.tool_calls import CallDelta, ToolCallParser
from router.request import GenerationRequest, Mode
from wire.tokens import pack_tokens, unpack_tokens


class ShownLogprob(NamedTuple):
    """Log-probability of one token, and where its text begins in the choice's text."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What is new of one choice since the client was last written to."""

    choice: int
    text: str = ""
    reasoning: str = ""  # thinking, which is no part of the text
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where they are asked for
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # of the client's stops, the one that ended it

    @property
    def only_text(self) -> bool:
        """Whether text is all that is new, as of nearly every token."""
        return not (
            self.finish_reason or self.logprobs or self.calls or self.reasoning or self.token_ids
        ) and bool(self.text)


class RunResult(NamedTuple):
    """What to do after a run of tokens."""

    fresh_tokens: int = 0
    stopped: bool = False  # a stop string ended the choice: the worker must be told
    gap: bool = False  # tokens are missing: ask for a resume


_ONE_TOKEN = RunResult(1)  # nearly every run


class ChoiceRecord:
    """One of the ``n`` answers.

    Args:
        index: Its place among them.
        request: What was asked.
        tokenizer: For its text.
    """

    def __init__(self, index: int, request: GenerationRequest, tokenizer: TextTokenizer) -> None:
        self.index = index
        shown, thinking = request.shown, request.thinking
        tags = thinking.syntax.special_ids if thinking is not None else frozenset[int]()
        self._detokenizer = Detokenizer(
            tokenizer,
            shown.stops,
            request.sampling.min_tokens,
            stop_text=shown.stop_text,
            special_ids=None if shown.special_tokens else tags,
        )
        self._thinking = ReasoningParser(thinking) if thinking is not None else None
        self._hides_thinking = thinking is not None and not thinking.shown
        self._tools = ToolCallParser() if request.reads_calls else None
        self._silent = request.prompt_logprobs_only  # its one token is not shown
        self._checked_schema, self._checked_tools = request.checked_schema, request.checked_tools
        self._arguments: dict[int, tuple[str, str]] = {}  # of calls, with the name of the tool
        self._content: list[str] = []  # where it is looked at when it is complete
        self.violations: tuple[str, ...] = ()  # keywords of the schema that it does not keep
        self._tells_ids = shown.token_ids
        self._stop_token_ids = request.sampling.stop_token_ids
        self.reasoning_tokens = 0
        self.token_ids: list[int] = []
        self.next_index = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.completion_tokens = 0
        self._pending = Delta(index)

    def push(self, run: TokenRun) -> RunResult:
        """Take a run of tokens of this choice."""
        if self.finish_reason is not None:
            return RunResult()
        if run.index > self.next_index:
            return RunResult(gap=True)
        if self._silent:
            self._end("length", None)
            return RunResult()
        ids = unpack_tokens(run.token_ids)  # a stop token is not among them
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
        return _ONE_TOKEN if fresh == 1 else RunResult(fresh)

    def _push_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        offset = self._detokenizer.text_length
        self.token_ids.append(token_id)
        self.next_index += 1
        self.completion_tokens += 1
        text = self._detokenizer.push(token_id)
        if self._thinking is None:
            self._show_content(text)
        else:
            thought = self._thinking.thinking
            self._show_parts(*self._thinking.push(text))
            self.reasoning_tokens += thought or self._thinking.thinking
        if self._tells_ids:
            self._pending.token_ids.append(token_id)
        if logprob is not None:
            top = zip(unpack_tokens(logprob.top_ids), logprob.top_logprobs, strict=True)
            shown = ShownLogprob(token_id, logprob.logprob, tuple(top), offset)
            self._pending.logprobs.append(shown)

    def _end(self, reason: str, stop_string: str | None, stop_token: int | None = None) -> None:
        self._show(self._detokenizer.finish(stop_token))
        if self._thinking is not None:
            self._show_parts(*self._thinking.finish())
        if self._tools is not None:
            self._add(*self._tools.finish())
            if reason == "stop" and self._tools.calls and not self._tools.cut:
                reason = "tool_calls"
        self.finish_reason = self._pending.finish_reason = reason
        self.violations = self._check(reason)
        # An end token of the model's own is no reason: the answer was complete.
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

    def _check(self, reason: str) -> tuple[str, ...]:
        """The keywords that a complete answer does not keep, of those that no grammar follows."""
        if reason == "stop" and self._checked_schema:
            return violations(self._checked_schema, "".join(self._content))
        if reason != "tool_calls" or not self._checked_tools:
            return ()
        called = self._arguments.values()
        known = [
            (self._checked_tools[name], said)
            for name, said in called
            if name in self._checked_tools
        ]
        return tuple(sorted({keyword for pair in known for keyword in violations(*pair)}))

    def _add(self, text: str, calls: Iterable[CallDelta]) -> None:
        """One delta for each call, however many pieces of it came: clients look at one only."""
        pending = self._pending
        pending.text += text
        if self._checked_schema:
            self._content.append(text)
        for call in calls:
            if self._checked_tools:
                name, said = self._arguments.get(call.index, (call.name or "", ""))
                self._arguments[call.index] = (name, said + call.arguments)
            if pending.calls and pending.calls[-1].index == call.index:
                last = pending.calls[-1]
                pending.calls[-1] = replace(last, arguments=last.arguments + call.arguments)
            else:
                pending.calls.append(call)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take."""
        pending = self._pending
        return bool(
            pending.text
            or pending.finish_reason
            or pending.reasoning
            or pending.calls
            or pending.logprobs
            or pending.token_ids
        )

    def take(self) -> Delta | None:
        """What the client has not got yet, or None. Tokens of several steps come out as one."""
        if not self.has_news:
            return None
        pending, self._pending = self._pending, Delta(self.index)
        return pending

    def release_payload(self) -> None:
        """Drop what only a running request needs."""
        self.token_ids, self._pending = [], Delta(self.index)
        self._content, self._arguments = [], {}
        self._checked_schema, self._checked_tools = "", {}


class RequestRecord:
    """One request over all its attempts.

    Args:
        request: What was asked.
        tokenizer: For the text of the answers.
    """

    def __init__(self, request: GenerationRequest, tokenizer: TextTokenizer) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.ticket = 0  # given when it leaves the queue; order at workers is (priority, ticket)
        self.attempt = 0
        self.error: BatonError | None = None
        self.route: RequestRoute | None = None
        self.times: RequestTimes | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.embedding = b""
        self._logprobs_intake = PromptLogprobsIntake(self.prompt_tokens - 1)
        self.sent = False  # something of the answer has left for the client
        self.moves: list[str] = []  # why the answer went on at another worker, each time
        self.paused_ns = 0  # between the last token at one worker and the first at the next
        self._pauses = False
        self.ended = False
        self.died_holding: set[bytes] = set()  # incarnations that died with this request
        self.failed_prefills: set[bytes] = set()  # incarnations that failed it, dead or not
        self.first_token_ns = 0
        self.second_token_ns = 0
        self.last_token_ns = 0
        self.timeline: list[tuple[str, int]] = [("arrived", request.arrived_ns)]
        self._tokenizer = tokenizer
        self.choices = self._fresh_choices()

    def _fresh_choices(self) -> list[ChoiceRecord]:
        return [
            ChoiceRecord(index, self.request, self._tokenizer)
            for index in range(self.request.sampling.n)
        ]

    def note(self, event: str, now_ns: int) -> None:
        """Write an event into the timeline (bounded)."""
        if len(self.timeline) < 256:
            self.timeline.append((event, now_ns))

    @property
    def can_go_on(self) -> bool:
        """Whether another worker can go on with the answer, behind the tokens that have come."""
        request = self.request
        if request.pooling or request.prompt_logprobs_only or not self.begun:
            return False
        return all(choice.finish_reason or choice.token_ids for choice in self.choices)

    @property
    def emitted(self) -> list[Emitted]:
        """What the next worker must take as given, per choice; empty for an answer that begins."""
        if not self.moves:
            return []
        return [
            Emitted(
                token_ids=pack_tokens(choice.token_ids), finish_reason=choice.finish_reason or ""
            )
            for choice in self.choices
        ]

    @property
    def to_place(self) -> GenerationRequest:
        """The request as its next attempt computes it: with the longest answer as prompt.

        The pools that a client asked for are those in which its answer begins: it is not broken
        off because one of them is empty later.
        """
        if not self.can_go_on:
            return self.request
        live = [choice.token_ids for choice in self.choices if choice.finish_reason is None]
        longest = max(live, key=len, default=[])
        prompt = (*self.request.prompt, *longest)
        sampling = msgspec.structs.replace(self.request.sampling, prompt_logprobs=None)
        mode: Mode = "auto" if self.request.mode == "disaggregated" else self.request.mode
        return replace(self.request, prompt=prompt, sampling=sampling, mode=mode, goes_on=True)

    def next_attempt(self, why: str = "") -> int:
        """Begin an attempt.

        An answer that has begun goes on behind its tokens, which are facts; one of which nothing
        has come starts anew.

        Args:
            why: What ended the attempt before.
        """
        goes_on = self.can_go_on
        if self.sent and not goes_on:
            raise InternalError("an answer that has begun cannot be started again")
        self.attempt += 1
        self.route = None
        if goes_on:
            self.moves.append(why)
            self._pauses = True
            return self.attempt
        if self.attempt > 1:
            self.first_token_ns = self.second_token_ns = self.last_token_ns = 0
            self.choices = self._fresh_choices()
            self.prompt_logprobs = None
            self._logprobs_intake = PromptLogprobsIntake(self.prompt_tokens - 1)
        return self.attempt

    @property
    def next_indices(self) -> list[int]:
        """Per choice, the first token index that has not come: what a resume asks for."""
        return [choice.next_index for choice in self.choices]

    @property
    def begun(self) -> bool:
        """Whether any token has come."""
        return self.first_token_ns > 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended well."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return self.route.cached_tokens if self.route is not None else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, those that ended a choice included."""
        first, *others = self.choices
        return first.completion_tokens + sum(choice.completion_tokens for choice in others)

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens generated, those of the thinking, its tags included."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    def on_route(self, route: RequestRoute, now_ns: int) -> None:
        """The worker reports where the request runs."""
        if route.attempt == self.attempt and not self.ended:
            self.route = route
            self.note("routed", now_ns)

    def on_run(self, run: TokenRun, now_ns: int) -> RunResult:
        """Tokens came. Those of another attempt, or after the end, are dropped."""
        if run.attempt != self.attempt or self.ended or run.choice >= len(self.choices):
            return RunResult()
        if run.HasField("prompt_logprobs"):
            return RunResult(gap=not self._take_prompt_logprobs(run.prompt_logprobs))
        if self.request.wants_prompt_logprobs and self.prompt_logprobs is None:
            raise InternalError("the worker sent a token before the scores of the prompt")
        self.embedding = run.embedding
        result = self.choices[run.choice].push(run)
        if not result.fresh_tokens and not run.finish_reason:
            return result
        if self._pauses:
            self._pauses = False
            self.paused_ns += now_ns - self.last_token_ns
            self.note("goes on", now_ns)
        if not self.first_token_ns:
            self.first_token_ns = now_ns
            self.note("first token", now_ns)
        elif not self.second_token_ns:
            self.second_token_ns = now_ns
        self.last_token_ns = now_ns
        if (run.finish_reason or result.stopped) and self.finished:
            self.ended = True
            self.note("finished", now_ns)
        return result

    def _take_prompt_logprobs(self, part: common_pb2.PromptLogprobs) -> bool:
        """A slice of the prompt logprobs came; False if one before it is missing."""
        columns = (part.logprobs, part.ranks, part.top_ids, part.top_logprobs)
        taken = self._logprobs_intake.put(part.begin, PromptLogprobs(part.alternatives, *columns))
        self.prompt_logprobs = self._logprobs_intake.complete
        return taken

    def fail(self, error: BatonError, now_ns: int) -> bool:
        """End with an error. Returns False if it had ended before: the first end counts."""
        if self.ended:
            return False
        self.ended = True
        self.error = error
        self.note(f"failed: {error.code}", now_ns)
        return True

    @property
    def has_news(self) -> bool:
        """Whether there is anything for the client: text, an end, or an error."""
        return self.error is not None or any(choice.has_news for choice in self.choices)

    def take(self) -> list[Delta]:
        """Everything that the client has not got yet."""
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    def release_payload(self) -> None:
        """The answer was written: keep its figures for ``explain``, drop its tokens."""
        sampling = self.request.sampling
        grammar = sampling.grammar[:1]  # whether there was one
        sampling = msgspec.structs.replace(sampling, grammar=grammar, logit_bias=())
        self.request = replace(
            self.request, prompt=(), sampling=sampling, checked_schema="", checked_tools={}
        )
        self.prompt_logprobs, self._logprobs_intake, self.embedding = (
            None,
            PromptLogprobsIntake(0),
            b"",
        )
        for choice in self.choices:
            choice.release_payload()
