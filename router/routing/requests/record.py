"""Record of one request: received tokens, what the client may see, and the end. Sans-IO.

Frames of the worker go in (``on_run``, ``on_route``, ``fail`` …), deltas and the end come out
(``take``). An emitted token is final: another worker can resume the response from this record.

    received ── index 0 … ── next_index      duplicates below are dropped, a hole needs a resume
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
from router.routing.requests.choice import ONE_TOKEN, ChoiceRecord, Delta, RunResult


class RequestRecord:
    """Record of one request over all its attempts."""

    def __init__(self, request: GenerationRequest, tokenizer: TextTokenizer) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.ticket = 0  # drawn when it leaves the queue; workers order by (priority, ticket)
        self.attempt = 0
        self.error: BatonError | None = None
        self.route: RequestRoute | None = None
        self.times: RequestTimes | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.embedding = b""
        self._logprobs_intake = PromptLogprobsIntake(self.prompt_tokens - 1)
        self.sent = False  # the client has a part of the response
        self.moves: list[str] = []  # reason of each migration
        self.paused_ns = 0  # between the last token at one worker and the first at the next
        self._pauses = False
        self.ended = False
        self.died_holding: set[bytes] = set()  # incarnations that died with this request
        self.failed_prefills: set[bytes] = set()  # incarnations that failed it, dead or not
        self.first_token_ns = 0
        self.second_token_ns = 0
        self.last_token_ns = 0
        self.timeline: list[tuple[str, int]] = [("arrived", request.arrived_ns)]
        self.tokenizer = tokenizer
        self._plain_frames = not (request.wants_prompt_logprobs or request.pooling)
        self.choices = self._fresh_choices()

    def _fresh_choices(self) -> list[ChoiceRecord]:
        return [
            ChoiceRecord(index, self.request, self.tokenizer)
            for index in range(self.request.sampling.n)
        ]

    def note(self, event: str, now_ns: int) -> None:
        """Append an event to the timeline, which is bounded."""
        if len(self.timeline) < 256:
            self.timeline.append((event, now_ns))

    @property
    def can_go_on(self) -> bool:
        """True if another worker can resume the response after the received tokens."""
        request = self.request
        if request.pooling or request.prompt_logprobs_only or not self.begun:
            return False
        return all(choice.finish_reason or choice.token_ids for choice in self.choices)

    @property
    def emitted(self) -> list[Emitted]:
        """Tokens that the next worker resumes after, per choice; empty for a new response."""
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
        """Request of the next attempt, whose prompt includes the longest choice.

        A mode that the client asked for applies to the start of the response: it is not aborted
        when a pool is empty later.
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
        """Begin an attempt, ``why`` the previous one ended, and return its number.

        A response that has begun is resumed after its tokens; one without tokens starts anew.
        """
        goes_on = self.can_go_on
        if self.sent and not goes_on:
            raise InternalError("cannot resume: the client has a part of the response")
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
        """First missing token index of each choice, from which a resume continues."""
        return [choice.next_index for choice in self.choices]

    @property
    def begun(self) -> bool:
        """True once a token has arrived."""
        return self.first_token_ns > 0

    @property
    def finished(self) -> bool:
        """True once every choice has a finish reason."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were not computed for this request."""
        return self.route.cached_tokens if self.route is not None else 0

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens, with those that ended a choice."""
        first, *others = self.choices
        return first.completion_tokens + sum(choice.completion_tokens for choice in others)

    @property
    def reasoning_tokens(self) -> int:
        """Number of generated tokens that are thinking, with its tags."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    def on_route(self, route: RequestRoute, now_ns: int) -> None:
        """Note the workers of the current attempt."""
        if route.attempt == self.attempt and not self.ended:
            if self.route is None:  # others correct it
                self.note("routed", now_ns)
            self.route = route

    def on_run(self, run: TokenRun, now_ns: int) -> RunResult:
        """Take tokens. Those of another attempt, or after the end, are dropped."""
        if run.attempt != self.attempt or self.ended or run.choice >= len(self.choices):
            return RunResult()
        choice = self.choices[run.choice]
        goes_on = self.first_token_ns and not self._pauses and choice.finish_reason is None
        if goes_on and choice.plain and self._plain_frames and (fresh := choice.push_plain(run)):
            self.second_token_ns = self.second_token_ns or now_ns
            self.last_token_ns = now_ns
            return ONE_TOKEN if fresh == 1 else RunResult(fresh)
        if run.HasField("prompt_logprobs"):
            return RunResult(gap=not self._take_prompt_logprobs(run.prompt_logprobs))
        if self.request.wants_prompt_logprobs and self.prompt_logprobs is None:
            return RunResult(gap=True)  # a step on a new stream overtook its resume
        self.embedding = run.embedding
        result = choice.push(run)
        if not result.fresh_tokens and not run.finish_reason:
            return result
        if self._pauses:
            self._pauses = False
            self.paused_ns += now_ns - self.last_token_ns
            self.note("response resumed", now_ns)
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
        """Take a slice of the prompt logprobs; return False if one before it is missing."""
        columns = (part.logprobs, part.ranks, part.top_ids, part.top_logprobs)
        taken = self._logprobs_intake.put(part.begin, PromptLogprobs(part.alternatives, *columns))
        self.prompt_logprobs = self._logprobs_intake.complete
        return taken

    def fail(self, error: BatonError, now_ns: int) -> bool:
        """End with an error; return False if the request had ended before."""
        if self.ended:
            return False
        self.ended = True
        self.error = error
        self.note(f"failed: {error.code}", now_ns)
        return True

    def abort(self, now_ns: int) -> bool:
        """End with the tokens received so far; return False if the request had ended before."""
        if self.ended:
            return False
        for choice in self.choices:
            choice.abort()
        self.ended = True
        self.note("aborted", now_ns)
        return True

    @property
    def has_news(self) -> bool:
        """True if there is text, an end or an error for the client."""
        return self.error is not None or any(choice.has_news for choice in self.choices)

    def take(self) -> list[Delta]:
        """Return everything that the client has not received."""
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    def take_texts(self) -> list[str]:
        """Return new texts of a plain response, one per token; `take` has the rest.

        So a stream has the same chunks whether its tokens were written one by one or together.
        """
        choice = self.choices[0]
        return choice.take_texts() if choice.plain and len(self.choices) == 1 else []

    @property
    def is_plain(self) -> bool:
        """True if `take_texts` returns all that there is for the client now."""
        choice = self.choices[0]
        return choice.plain and not (choice.finish_reason or self.error or len(self.choices) > 1)

    def release_payload(self) -> None:
        """Keep the figures of a response that was written, and drop its tokens."""
        sampling = self.request.sampling
        grammar = sampling.grammar[:1]  # still shows that there was one
        sampling = msgspec.structs.replace(sampling, grammar=grammar, logit_bias=())
        self.request = replace(
            self.request,
            prompt=(),
            images=(),
            chain=b"",
            sampling=sampling,
            checked_schema="",
            checked_tools={},
        )
        self._logprobs_intake = PromptLogprobsIntake(0)
        self.prompt_logprobs = None
        self.embedding = b""
        for choice in self.choices:
            choice.release_payload()
