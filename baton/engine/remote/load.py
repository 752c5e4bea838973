"""Load and speed of an engine behind HTTP, from the arrival of its tokens, without I/O.

It does not report its steps, but all sequences of a step stream their tokens together. A step
ends when a sequence has a second token, or when nothing arrives for ``SETTLED_NS``:

    arrivals   a b c     a b c     a b c D       D is the first token of a new prompt
    steps      [step 1]  [step 2]  [step 3: with D's prompt]

What was cached when a prompt came may be evicted while it waits. So a prompt of which tokens are
expected to be cached is measured when the server has counted them, at the end of its response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from baton.engine.core.batch_state import equal_blocks
from baton.engine.remote.others import OtherLoad
from baton.types.events import StepDone
from baton.types.geometry import BLOCK_TOKENS, context_tokens
from baton.types.pool_counts import BlockCounts, TierCounts

SETTLED_NS = 20_000_000
_SHORT_TOKENS = 32  # to compute, such as those of a probe: they take no step of many seconds
_COMPARED = 64  # waiting prompts that a new one is compared with


@dataclass(slots=True, eq=False)
class SequenceProgress:
    """Progress of a sequence.

    Attributes:
        cached_tokens: Prompt tokens that the engine has cached, as far as known.
        is_counted: Whether this is the engine's own count, or none will come.
        comes: Whether its KV comes from another worker, so that the engine computes no prompt.
        held: Whether its prompt is computed and its KV only waits for another worker.
        hashes: Block hashes of its prompt, if the engine computes blocks once for all prompts.
        begun_ns: First end of a step behind its submission: its prompt can be in the next one.
        newest_ns: Arrival of its newest tokens; ``first_ns`` of its first one.
        input_ns: Its part of the steps, for the prompt; ``output_ns`` the same for its tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    submitted_ns: int
    comes: bool = False
    is_counted: bool = False
    held: bool = False
    hashes: Sequence[bytes] = ()
    begun_ns: int = 0
    first_ns: int = 0
    newest_ns: int = 0
    generated: int = 0
    input_ns: int = 0
    output_ns: int = 0

    @property
    def context(self) -> int:
        """Tokens of the sequence."""
        return self.prompt_tokens + self.generated

    @property
    def is_due(self) -> bool:
        """True if its next token is expected within seconds."""
        has_prompt = self.first_ns > 0 or (not self.comes and self.uncached <= _SHORT_TOKENS)
        return has_prompt and not self.held

    @property
    def is_computed(self) -> bool:
        """True if the engine computes it: its KV neither comes from a worker nor waits for one."""
        return not self.held and (self.first_ns > 0 or not self.comes)

    @property
    def uncached(self) -> int:
        """Prompt tokens to compute."""
        return 0 if self.comes else max(self.prompt_tokens - self.cached_tokens, 1)


class LoadMeter:
    """Steps and load of one engine; ``total_blocks`` are Baton's blocks in its pool.

    Attributes:
        others: Load of the server's other clients.
        tiers: Returns the counters of its KV tiers.
    """

    def __init__(self, total_blocks: int) -> None:
        self.others = OtherLoad()
        self.tiers: Callable[[], tuple[TierCounts, ...]] = tuple
        self._total_blocks = total_blocks
        self._rows: dict[tuple[str, int], SequenceProgress] = {}
        self._step = 0
        self._batch: dict[tuple[str, int], SequenceProgress] = {}  # rows with a token in this step
        self._batch_ns = 0  # first arrival of this step
        self._last_ns = 0  # first arrival of the step before
        self._prompt_ns = 0  # arrival of the newest first token in an ended step
        self._new: list[SequenceProgress] = []  # rows of the batch whose first token this is
        self._uncounted: list[tuple[list[SequenceProgress], int]] = []  # prompts, and their time

    def submitted(self, request_id: str, choice: int, row: SequenceProgress) -> None:
        """Add a sequence that waits; what it shares with waiting ones is computed for them."""
        waiting = islice((other for other in self._rows.values() if not other.first_ns), _COMPARED)
        shared = max((equal_blocks(row.hashes, other.hashes) for other in waiting), default=0)
        row.cached_tokens = max(row.cached_tokens, shared * BLOCK_TOKENS)
        self._rows[request_id, choice] = row

    @property
    def sequences(self) -> int:
        """Number of the worker's live sequences."""
        return len(self._rows)

    @property
    def generated(self) -> int | None:
        """Tokens of the live sequences; None if none has begun, or one has no token to expect."""
        rows = self._rows.values()
        has_begun = any(row.first_ns for row in rows)
        is_due = has_begun and all(row.is_due for row in rows)
        return sum(row.generated for row in rows) if is_due else None

    def computed_since(self, before_ns: int) -> int:
        """Return how many sequences the engine has since ``before_ns`` at least, to compute."""
        rows = (row for row in self._rows.values() if row.is_computed)
        return sum(row.first_ns > 0 or row.submitted_ns < before_ns for row in rows)

    def silent_since(self, before_ns: int) -> list[str]:
        """Return the requests to compute that had no token since ``before_ns``."""
        return [
            name
            for (name, _), row in self._rows.items()
            if row.is_computed and (row.newest_ns or row.submitted_ns) < before_ns
        ]

    def row(self, request_id: str, choice: int) -> SequenceProgress:
        """Return a live sequence."""
        return self._rows[request_id, choice]

    def input_ns(self, request_id: str, choice: int) -> int:
        """Return a sequence's part of the steps for its prompt, which the current one computed."""
        row = self._rows[request_id, choice]
        rows = len(self._batch) - len(self._new)
        work = sum(new.uncached for new in self._new) + rows
        return row.input_ns + (self._batch_ns - self._began_ns()) // (work or 1) * row.uncached

    def counted(
        self, request_id: str, choice: int, cached_tokens: int | None, cached_blocks: int
    ) -> StepDone | None:
        """Note the cached tokens of a prompt by the engine; return the prompts measured by this.

        Without a count, it is as expected.
        """
        row = self._rows[request_id, choice]
        row.cached_tokens = row.cached_tokens if cached_tokens is None else cached_tokens
        row.is_counted = True
        for sample in self._uncounted:
            rows, duration_ns = sample
            if row in rows and all(one.is_counted for one in rows):
                self._uncounted.remove(sample)
                return _measured(self.status(cached_blocks), rows, duration_ns)
        return None

    def ended(self, request_id: str, choice: int) -> SequenceProgress | None:
        """Remove a sequence, and return it."""
        row = self._rows.pop((request_id, choice), None)
        if row is not None and not row.is_counted:
            row.is_counted = True
            self._uncounted = [sample for sample in self._uncounted if row not in sample[0]]
        return row

    def tokens(
        self, request_id: str, choice: int, count: int, now_ns: int, cached_blocks: int
    ) -> StepDone | None:
        """Note tokens of a sequence; return the step that has ended by this, if any."""
        key = request_id, choice
        step = self.end_step(cached_blocks) if key in self._batch else None
        row = self._rows[key]
        row.newest_ns = now_ns
        if row.comes and not row.first_ns:  # the time since the step before was spent on loading
            row.first_ns = now_ns
            row.generated += count
            return step
        if not self._batch:
            self._batch_ns = now_ns
        if not row.first_ns:
            row.first_ns = now_ns
            self._new.append(row)
        row.generated += count
        self._batch[key] = row
        return step

    @property
    def is_open(self) -> bool:
        """True while a step has tokens and has not ended."""
        return bool(self._batch)

    def settled(self, now_ns: int, cached_blocks: int) -> StepDone | None:
        """Return the step that has ended because no more tokens arrived, if any."""
        if not self._batch or now_ns - self._batch_ns < SETTLED_NS:
            return None
        return self.end_step(cached_blocks)

    def end_step(self, cached_blocks: int) -> StepDone:
        """Return the current step, and begin the next one."""
        duration_ns = max(self._batch_ns - self._began_ns(), 1)
        prompt_tokens = sum(row.uncached for row in self._new)
        decoding = [row for row in self._batch.values() if row not in self._new]
        self._charge(duration_ns, prompt_tokens, decoding)
        if self._new:
            duration_ns = self._end_prompts()
            if any(row.cached_tokens and not row.is_counted for row in self._new):
                self._uncounted.append((self._new, duration_ns))
                duration_ns = 0
        self._note_waiting()
        self._step += 1
        step = msgspec.structs.replace(
            _measured(self.status(cached_blocks), self._new, duration_ns),
            decode_rows=len(decoding),
            decode_context=sum(row.context for row in decoding),
        )
        self._last_ns = self._batch_ns
        self._batch = {}
        self._new = []
        return step

    def status(self, cached_blocks: int) -> StepDone:
        """Return the load, without figures of a step."""
        answering = [row for row in self._rows.values() if row.first_ns and not row.held]
        waiting = [row for row in self._rows.values() if not row.first_ns]
        others = self.others
        answering_context = sum(row.context for row in answering)
        queued_tokens = sum(row.uncached for row in waiting)
        queued_context = sum(
            context_tokens(row.prompt_tokens - row.uncached, row.prompt_tokens) for row in waiting
        )
        of_other = context_tokens(
            others.prompt_tokens - others.computed_tokens, others.prompt_tokens
        )
        return StepDone(
            step=self._step,
            present=True,
            running=len(answering) + bool(waiting) + others.running,
            waiting=max(len(waiting) - 1, 0) + others.waiting,
            answering=len(answering) + others.running,
            answering_context=answering_context + others.running * others.prompt_tokens,
            coming_context=sum(row.prompt_tokens for row in waiting)
            + others.waiting * others.prompt_tokens,
            queued_prompt_tokens=queued_tokens + others.waiting * others.computed_tokens,
            queued_prompt_context=queued_context + others.waiting * of_other,
            blocks=self._blocks(cached_blocks),
            tiers=self.tiers(),
        )

    def _end_prompts(self) -> int:
        """Return the time for the prompts of this step, of which the steps before had parts.

        A long prompt takes several steps, in each of which other sequences have a token. And its
        first token may arrive before those tokens of its step, so it is timed by itself.
        """
        began_ns = min(row.begun_ns or row.submitted_ns for row in self._new)
        began_ns = max(began_ns, self._prompt_ns)
        self._prompt_ns = max(row.first_ns for row in self._new)
        return max(self._prompt_ns - began_ns, 1)

    def _note_waiting(self) -> None:
        """Note the end of a step for the sequences that wait since before it."""
        for row in self._rows.values():
            if not row.first_ns and not row.begun_ns and row.submitted_ns <= self._batch_ns:
                row.begun_ns = self._batch_ns

    def _began_ns(self) -> int:
        """Return when the step began: after the one before, or when its oldest work arrived."""
        if self._new:
            return max(self._last_ns, min(row.submitted_ns for row in self._new))
        oldest = min((row.first_ns for row in self._batch.values()), default=self._batch_ns)
        return max(self._last_ns, oldest)

    def _charge(
        self, duration_ns: int, prompt_tokens: int, decoding: list[SequenceProgress]
    ) -> None:
        share_ns = duration_ns // (prompt_tokens + len(decoding) or 1)
        for row in self._new:
            row.input_ns += share_ns * row.uncached
        for row in decoding:
            row.output_ns += share_ns

    def _blocks(self, cached_blocks: int) -> BlockCounts:
        used = sum(-(-row.context // BLOCK_TOKENS) for row in self._rows.values())
        in_use = min(used, self._total_blocks)
        cached = min(max(cached_blocks - in_use, 0), self._total_blocks - in_use)
        free = self._total_blocks - in_use - cached
        return BlockCounts(total=self._total_blocks, free=free, cached=cached, in_use=in_use)


def _measured(load: StepDone, prompts: Sequence[SequenceProgress], duration_ns: int) -> StepDone:
    return msgspec.structs.replace(
        load,
        duration_ns=duration_ns,
        prompt_tokens=sum(row.uncached for row in prompts),
        prompt_context=sum(
            context_tokens(row.prompt_tokens - row.uncached, row.prompt_tokens) for row in prompts
        ),
    )
