"""Tokens that a grammar allows next: a pure function of the grammar and the response so far.

    grammar ──compile (a thread)──▶ matcher at the start ──copy──▶ one matcher per choice
                                                                    │ rolled back or fed until it
    history of a SampleSpec ────────────────────────────────────────┘ has consumed this response

Nothing here is transferred, preempted or forked: the caller passes the response, and kept matchers
only save work. A copy takes microseconds, and so does each token that is fed again. Compiling may
take seconds, so a request's grammar is kept until the request ends.
"""

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from baton.engine.core.model_runner import GrammarStore
from baton.engine.core.plan import SampleSpec
from baton.model.artifact import ModelArtifact
from baton.text.grammar import GrammarCompiler, Vocabulary, check, vocabulary_of
from baton.text.tokenizer import load_tokenizer
from baton.types.errors import BatonError, GrammarError

Mask = npt.NDArray[np.bool_]

_START_S = 10.0
_KEPT_IDLE = 64  # compiled grammars that no request holds
_KEPT_STATES = 256
_KEY_TOKENS = 8
_T = TypeVar("_T")
_Key = tuple[str, int, int, int, tuple[int, ...]]


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    seen: list[int] = field(default_factory=list)

    def follow(self, answer: list[int]) -> None:
        """Roll back and feed the matcher until it has consumed exactly ``answer``."""
        same = _common(self.seen, answer)
        if same < len(self.seen):
            self.matcher.rollback(len(self.seen) - same)
        if same < len(answer):
            self.matcher.consume_tokens(answer[same:])
        check(self.matcher)
        self.seen = answer


class Grammars:
    """Compiled grammars of one engine, and matchers of recent responses.

    A thread calls ``vocabulary`` once, for the first grammar or a while after the start, when the
    weights need the CPUs. The masks have ``vocab_size`` elements.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._loading: Future[GrammarCompiler] = Future()
        self._needed = threading.Event()
        self._holders: Counter[str] = Counter()
        self._held: dict[str, LLMatcher] = {}
        self._idle: OrderedDict[str, LLMatcher] = OrderedDict()
        self._states: OrderedDict[_Key, _State] = OrderedDict()
        self._lock = threading.Lock()  # of compiled grammars: threads add, the step loop reads
        self.mask_ns = 0  # time spent by the last call of `masks`
        threading.Thread(target=self._load, args=(vocabulary,), daemon=True).start()

    def _load(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._needed.wait(_START_S)
        try:
            self._loading.set_result(GrammarCompiler(vocabulary()))
        except BaseException as error:  # noqa: BLE001 - raised again in `prepare`
            self._loading.set_exception(error)

    def hold(self, grammar: str) -> None:
        """Keep a grammar until ``release`` was called as often."""
        with self._lock:
            self._holders[grammar] += 1
            matcher = self._idle.pop(grammar, None)
            if matcher is not None:
                self._held[grammar] = matcher

    def release(self, grammar: str) -> None:
        """Remove one hold; a grammar without holds is kept while there is room."""
        with self._lock:
            self._holders[grammar] -= 1
            if not self._holders[grammar]:
                del self._holders[grammar]
                matcher = self._held.pop(grammar, None)
                if matcher is not None:
                    self._keep(grammar, matcher)

    def prepare(self, grammar: str) -> LLMatcher:
        """Return a grammar's matcher at its start, or raise ``GrammarError``. Slow; thread-safe."""
        with self._lock:
            matcher = self._held.get(grammar) or self._idle.get(grammar)
        if matcher is None:
            self._needed.set()
            matcher = self._loading.result().compile(grammar)
        with self._lock:
            self._keep(grammar, matcher)
        return matcher

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        if self._holders[grammar]:
            self._held[grammar] = matcher
            return
        self._idle[grammar] = matcher
        self._idle.move_to_end(grammar)
        while len(self._idle) > _KEPT_IDLE:
            self._idle.popitem(last=False)

    def masks(
        self, specs: Sequence[Sequence[SampleSpec]]
    ) -> tuple[list[list[Mask | None]], dict[int, GrammarError]]:
        """Return the allowed tokens of the samples in each row, and errors by row.

        Masks ``[V]`` are arranged like ``specs``; ``None`` allows every token.
        """
        began_ns = time.monotonic_ns()
        masks: list[list[Mask | None]] = [[None] * len(row_specs) for row_specs in specs]
        refused: dict[int, GrammarError] = {}
        any_grammar = False
        for row, row_specs in enumerate(specs):
            for column, spec in enumerate(row_specs):
                if spec.params.grammar:
                    any_grammar = True
                    try:
                        masks[row][column] = self.allowed(spec)
                    except GrammarError as error:
                        refused[row] = error
        self.mask_ns = time.monotonic_ns() - began_ns if any_grammar else 0
        return masks, refused

    def allowed(self, spec: SampleSpec) -> Mask:
        """Return a mask ``[V]`` of the tokens that may stand at ``len(spec.history)``; never empty.

        Raises:
            GrammarError: The history violates the grammar, or the grammar is too expensive here.
        """
        packed = self._query(spec, LLMatcher.compute_bitmask)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[: len(bits)] = bits[: self._vocab_size]
        return mask

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Return how many leading ``draft_tokens`` may follow the history."""
        return self._query(spec, lambda matcher: matcher.validate_tokens(list(draft_tokens)))

    def _query(self, spec: SampleSpec, question: Callable[[LLMatcher], _T]) -> _T:
        """Apply ``question`` to a matcher that has consumed the response so far.

        A matcher keeps its errors, and some limits count all its work. If a reused matcher fails, a
        new one decides, so that earlier use has no effect.
        """
        p = spec.params
        prompt = spec.prompt_tokens
        # The key only finds a state that is likely close; its tokens decide.
        tail = tuple(spec.history[max(prompt - _KEY_TOKENS, 0) : prompt])
        key = (p.grammar, p.seed, spec.choice, prompt, tail)
        answer = list(spec.history[prompt:])
        kept = self._states.pop(key, None)
        if kept is not None:
            with contextlib.suppress(GrammarError):
                return self._query_state(key, kept, answer, question)
        new = _State(self.prepare(p.grammar).deep_copy())
        return self._query_state(key, new, answer, question)

    def _query_state(
        self, key: _Key, state: _State, answer: list[int], question: Callable[[LLMatcher], _T]
    ) -> _T:
        state.follow(answer)
        result = question(state.matcher)
        check(state.matcher)
        self._states[key] = state  # a state that failed is not kept
        while len(self._states) > _KEPT_STATES:
            self._states.popitem(last=False)
        return result


def open_grammars(artifact: ModelArtifact) -> Grammars:
    """Return grammars over a model's vocabulary, which is read in a thread."""
    c = artifact.config
    return Grammars(
        lambda: vocabulary_of(load_tokenizer(artifact.tokenizer), c.vocab_size, c.eos_token_ids),
        c.vocab_size,
    )


def _common(left: list[int], right: list[int]) -> int:
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(i for i in range(size) if left[i] != right[i])


class GrammarCompileQueue(Generic[_T]):
    """Requests that wait for their grammar to compile beside the step loop.

    A grammar stays compiled from ``add`` until ``ended``.
    """

    def __init__(self, grammars: GrammarStore) -> None:
        self._grammars = grammars
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting: dict[str, tuple[_T, Future[LLMatcher]]] = {}
        self._held: dict[str, str] = {}  # request -> grammar

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, item: _T, grammar: str) -> None:
        """Compile ``grammar`` and keep ``item`` until that is done."""
        self.ended(request_id)
        self._held[request_id] = grammar
        self._grammars.hold(grammar)
        self._waiting[request_id] = (item, self._pool.submit(self._grammars.prepare, grammar))

    def drop(self, request_id: str) -> bool:
        """Forget a request; return whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        return waiting is not None

    def ended(self, request_id: str) -> None:
        """Release the grammar of an ended request, if it has one."""
        grammar = self._held.pop(request_id, None)
        if grammar is not None:
            self._grammars.release(grammar)

    def take(self) -> list[tuple[_T, BatonError | None]]:
        """Return the items whose grammar is done, each with its error."""
        done = [name for name, (_, future) in self._waiting.items() if future.done()]
        return [self._outcome(*self._waiting.pop(name)) for name in done]

    def _outcome(self, item: _T, future: Future[LLMatcher]) -> tuple[_T, BatonError | None]:
        fault = future.exception()
        if fault is None or isinstance(fault, BatonError):
            return item, fault
        return item, GrammarError(f"{type(fault).__name__}: {fault}")
