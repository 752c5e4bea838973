"""Which tokens a grammar allows next: a pure function of the grammar and the answer so far.

    grammar ──compile (a thread)──▶ matcher at the start ──copy──▶ one matcher per choice
                                                                    │ rolled back or fed until it
    history of a SampleSpec ────────────────────────────────────────┘ has seen this very answer

Nothing here must be handed over, preempted or forked: whoever asks brings the answer, and what is
kept only saves work. A copy takes microseconds, and so does each token that is fed again. Compiling
may take seconds, so the grammar of a request is kept for as long as the request lives.
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

_KEPT_IDLE = 64  # compiled grammars that no request holds
_KEPT_STATES = 256
_KEY_TOKENS = 8
_T = TypeVar("_T")
_Key = tuple[str, int, int, int, tuple[int, ...]]


@dataclass(slots=True)
class _State:
    """A matcher, and the tokens that it has seen."""

    matcher: LLMatcher
    seen: list[int] = field(default_factory=list)

    def follow(self, answer: list[int]) -> None:
        """Make it have seen ``answer``, by going back where it must and on from there.

        Raises:
            GrammarError: The answer does not follow the grammar.
        """
        same = _common(self.seen, answer)
        if same < len(self.seen):
            self.matcher.rollback(len(self.seen) - same)
        if same < len(answer):
            self.matcher.consume_tokens(answer[same:])
        check(self.matcher)
        self.seen = answer


class Grammars:
    """Compiled grammars of one engine, and where their answers stand.

    Args:
        vocabulary: Makes the model's vocabulary; called once, in a thread.
        vocab_size: Length of the masks.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._loading: Future[GrammarCompiler] = Future()
        self._holders: Counter[str] = Counter()
        self._held: dict[str, LLMatcher] = {}
        self._idle: OrderedDict[str, LLMatcher] = OrderedDict()
        self._states: OrderedDict[_Key, _State] = OrderedDict()
        self._lock = threading.Lock()  # of what is compiled: threads put, the step loop gets
        self.mask_ns = 0  # time spent by the last call of `masks`
        threading.Thread(target=self._load, args=(vocabulary,), daemon=True).start()

    def _load(self, vocabulary: Callable[[], Vocabulary]) -> None:
        try:
            self._loading.set_result(GrammarCompiler(vocabulary()))
        except BaseException as error:  # noqa: BLE001 - raised again where a grammar is asked for
            self._loading.set_exception(error)

    def hold(self, grammar: str) -> None:
        """Keep a grammar, compiled now or later, until as many calls of ``release``."""
        with self._lock:
            self._holders[grammar] += 1
            matcher = self._idle.pop(grammar, None)
            if matcher is not None:
                self._held[grammar] = matcher

    def release(self, grammar: str) -> None:
        """One holder less; without any, a grammar is kept while there is room."""
        with self._lock:
            self._holders[grammar] -= 1
            if not self._holders[grammar]:
                del self._holders[grammar]
                matcher = self._held.pop(grammar, None)
                if matcher is not None:
                    self._keep(grammar, matcher)

    def prepare(self, grammar: str) -> LLMatcher:
        """A grammar's matcher at its start; compiling it may take long. For any thread.

        Raises:
            GrammarError: It does not compile.
        """
        with self._lock:
            matcher = self._held.get(grammar) or self._idle.get(grammar)
        if matcher is None:
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
        """Allowed tokens for every sample of a step.

        Args:
            specs: For each row of logits its samples.

        Returns:
            Masks ``[V]`` in the same arrangement, ``None`` where everything is allowed; and by row
            what made its masks impossible.
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
        """The tokens ``[V]`` that may stand at ``len(spec.history)``; never none.

        Raises:
            GrammarError: The history does not follow the grammar, or the grammar takes too much
                work at this place.
        """
        packed = self._ask(spec, LLMatcher.compute_bitmask)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[: len(bits)] = bits[: self._vocab_size]
        return mask

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """How many of ``draft_tokens``, in order, may follow the history.

        Raises:
            GrammarError: The history does not follow the grammar.
        """
        return self._ask(spec, lambda matcher: matcher.validate_tokens(list(draft_tokens)))

    def _ask(self, spec: SampleSpec, question: Callable[[LLMatcher], _T]) -> _T:
        """What a matcher that has seen the answer so far says to ``question``.

        A matcher keeps its errors, and some limits count all that it ever did. So if one fails that
        was used before, a new one has the last word: former use must not show.
        """
        p = spec.params
        prompt = spec.prompt_tokens
        # The key only finds a state that is likely near; whether it fits, its tokens decide.
        tail = tuple(spec.history[max(prompt - _KEY_TOKENS, 0) : prompt])
        key = (p.grammar, p.seed, spec.choice, prompt, tail)
        answer = list(spec.history[prompt:])
        kept = self._states.pop(key, None)
        if kept is not None:
            with contextlib.suppress(GrammarError):
                return self._ask_state(key, kept, answer, question)
        new = _State(self.prepare(p.grammar).deep_copy())
        return self._ask_state(key, new, answer, question)

    def _ask_state(
        self, key: _Key, state: _State, answer: list[int], question: Callable[[LLMatcher], _T]
    ) -> _T:
        state.follow(answer)
        said = question(state.matcher)
        check(state.matcher)
        self._states[key] = state  # a state that failed is not kept
        while len(self._states) > _KEPT_STATES:
            self._states.popitem(last=False)
        return said


def open_grammars(artifact: ModelArtifact) -> Grammars:
    """Grammars over a model's vocabulary, which a thread begins to read."""
    c = artifact.config
    return Grammars(
        lambda: vocabulary_of(
            load_tokenizer(artifact.tokenizer_source()), c.vocab_size, c.eos_token_ids
        ),
        c.vocab_size,
    )


def _common(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(i for i in range(size) if left[i] != right[i])


class GrammarCompileQueue(Generic[_T]):
    """Requests that wait for their grammar to be compiled, off the step loop.

    From ``add`` until ``ended`` the grammar stays compiled.

    Args:
        grammars: Where compiled grammars go.
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
        """Forget a request; returns whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()
        return waiting is not None

    def ended(self, request_id: str) -> None:
        """A request, with a grammar or without, is over."""
        grammar = self._held.pop(request_id, None)
        if grammar is not None:
            self._grammars.release(grammar)

    def take(self) -> list[tuple[_T, BatonError | None]]:
        """What need wait no longer, each with what went wrong."""
        done = [name for name, (_, future) in self._waiting.items() if future.done()]
        return [self._outcome(*self._waiting.pop(name)) for name in done]

    def _outcome(self, item: _T, future: Future[LLMatcher]) -> tuple[_T, BatonError | None]:
        fault = future.exception()
        if fault is None or isinstance(fault, BatonError):
            return item, fault
        return item, GrammarError(f"{type(fault).__name__}: {fault}")
