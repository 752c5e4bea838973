"""The record of one request: what was emitted, what may be shown, how it ended. Sans-IO.

Frames of the worker go in (``on_run``, ``on_route``, ``fail`` …), text and the end come out
(``take``). An emitted token is never taken back: from this record alone the answer can go on.

    received ── index 0 … ── next_index      duplicates below are dropped, a hole asks for a resume
    shown    ── pending ── held              pending waits for the client, held for a stop string
"""

from dataclasses import replace

import msgspec
from batonpb import common_pb2
from batonpb.decode_pb2 import Emitted, RequestRoute, RequestTimes, TokenRun

from baton.text.tokenizer import TextTokenizer
from baton.types.errors import BatonError, InternalError
from baton.types.prompt_outputs import PromptLogprobs, PromptLogprobsIntake
from baton.wire.tokens import pack_tokens
from router.request import GenerationRequest, Mode
from router.routing.choice import ONE_TOKEN, ChoiceRecord, Delta, RunResult


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
        self._plain_frames = not (request.wants_prompt_logprobs or request.pooling)
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
        choice = self.choices[run.choice]
        goes_on = self.second_token_ns and not self._pauses and choice.finish_reason is None
        if goes_on and choice.plain and self._plain_frames and choice.push_plain(run):
            self.last_token_ns = now_ns
            return ONE_TOKEN
        if run.HasField("prompt_logprobs"):
            return RunResult(gap=not self._take_prompt_logprobs(run.prompt_logprobs))
        if self.request.wants_prompt_logprobs and self.prompt_logprobs is None:
            return RunResult(gap=True)  # a step on a new stream was faster than its resume
        self.embedding = run.embedding
        result = choice.push(run)
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

    def take_texts(self) -> list[str]:
        """New texts, one of each token, where an answer is nothing else; `take` has what is left.

        So a stream has the same chunks whether its tokens were written one by one or together.
        """
        choice = self.choices[0]
        return choice.take_texts() if choice.plain and len(self.choices) == 1 else []

    @property
    def is_plain(self) -> bool:
        """Whether `take_texts` has all that there is for the client now."""
        choice = self.choices[0]
        return choice.plain and not (choice.finish_reason or self.error or len(self.choices) > 1)

    def release_payload(self) -> None:
        """The answer was written: keep its figures for ``explain``, drop its tokens."""
        sampling = self.request.sampling
        grammar = sampling.grammar[:1]  # whether there was one
        sampling = msgspec.structs.replace(sampling, grammar=grammar, logit_bias=())
        self.request = replace(
            self.request, prompt=(), sampling=sampling, checked_schema="", checked_tools={}
        )
        self._logprobs_intake = PromptLogprobsIntake(0)
        self.prompt_logprobs = None
        self.embedding = b""
        for choice in self.choices:
            choice.release_payload()
