"""Speculative decoding: propose the next tokens of a response and verify them in one step.

    tokens of a row   [ last token | draft token 1 | draft token 2 | draft token 3 ]
    sampled           [     a      |       b       |       c       |       d       ]
    a == draft token 1, b == draft token 2, c != draft token 3:   the response grows by a, b, c

The sampled token is a function of the tokens before it (and of seed, choice, position). Right draft
tokens save steps, wrong ones cost time, and with ``numerics: exact`` neither changes the tokens.
The number of draft tokens is chosen per request and step, from the recent acceptance rate and from
the measured time that one more draft token costs the batch. Pure: durations come from the caller.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.core.sequence import TokenSequence, blocks_for
from baton.engine.core.speculative.acceptance import accepted_draft_tokens
from baton.telemetry.running_mean import RunningMean
from baton.types.params import SampledToken

MAX_DRAFT_TOKENS = 16

_PRIOR_RATE = 0.6  # acceptance rate before any was measured
_RATE_WEIGHT = 0.2
# steps without draft tokens before the next trial
_FIRST_WAIT = 32
_LONGEST_WAIT = 1024
_TRIAL_DRAFT_TOKENS = 2
_DRAFT_TOKEN_SHARE = 0.05  # cost of a draft token in plain steps of one request, before measured
_PLAIN_EVERY = 64  # steps with draft tokens before a plain one is timed again
_PROBE_EVERY = 256  # steps without worthwhile draft tokens before one is timed again


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation settings of a worker."""

    mode: str = "off"  # "off" | "ngram" | "draft"
    draft: str = ""  # reference of the draft model
    tokens: int = 4  # limit of draft tokens per step and sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence; acceptance is measured per ``kind``."""

    tokens: Sequence[int] = ()
    kind: int = 0


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """Sequence that may get draft tokens; ``allowed(kind)`` returns how many are worthwhile."""

    sequence: TokenSequence
    allowed: Callable[[int], int]


class Proposer(Protocol):
    """Source of draft tokens."""

    @property
    def untimed(self) -> bool:
        """Return whether the last call did work that other steps lack; its time is not counted."""

    def propose(self, candidates: Sequence[DraftCandidate], budget_tokens: int) -> list[Proposal]:
        """Return one proposal, possibly empty, per sequence that decodes in this step.

        ``budget_tokens`` limits the proposer's own computation.
        """

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        """Forget all other sequences."""


class StepCost:
    """Measured cost of a draft token, as a share of a step without draft tokens."""

    def __init__(self) -> None:
        self._plain_ns: dict[int, RunningMean] = {}  # by decode rows
        self._since_plain: dict[int, int] = {}
        self._draft_token_ns = RunningMean(0.1)

    def note(self, decodes: int, draft_tokens: int, duration_ns: int) -> None:
        """Learn from a step that computed only ``decodes`` rows and their draft tokens."""
        plain_ns = self._plain_ns.get(decodes)
        if not draft_tokens:
            self._since_plain[decodes] = 0
            self._plain_ns.setdefault(decodes, RunningMean(0.3)).add(duration_ns)
        elif plain_ns is not None:
            self._since_plain[decodes] += 1
            sample_ns = max(duration_ns - plain_ns.value, 0.0) / draft_tokens
            self._draft_token_ns.add(min(sample_ns, 2 * plain_ns.value))

    def needs_plain_step(self, decodes: int) -> bool:
        """Return whether to time a step without draft tokens before the next one with some."""
        return self._since_plain.get(decodes, _PLAIN_EVERY) >= _PLAIN_EVERY

    def share(self, decodes: int) -> float:
        """Return the output tokens that ``decodes`` rows lose by the time of one draft token."""
        plain_ns = self._plain_ns.get(decodes)
        if plain_ns is None or not self._draft_token_ns.measured:
            return _DRAFT_TOKEN_SHARE * decodes
        return decodes * self._draft_token_ns.value / max(plain_ns.value, 1.0)


@dataclass(slots=True)
class _Pace:
    """Acceptance rates of one sequence, and the number of draft tokens they justify."""

    rates: dict[int, float] = field(default_factory=dict)  # acceptance rate by kind
    passed: int = 0
    wait: int = _FIRST_WAIT
    banned: bool = False

    def allowed(self, kind: int, cost: float, most: int) -> int:
        """Return the number of draft tokens that are worth their cost; sometimes a trial."""
        if self.banned or most < 1:
            return 0
        rate = self.rates.get(kind, _PRIOR_RATE)
        count = 0
        chance = rate
        while count < most and chance > cost:
            count = count + 1
            chance = chance * rate
        if count:
            return count
        self.passed += 1
        if self.passed < self.wait:
            return 0
        self.passed = 0
        self.wait = min(2 * self.wait, _LONGEST_WAIT)
        return min(_TRIAL_DRAFT_TOKENS, most)

    def note(self, kind: int, draft_tokens: int, right: int) -> None:
        for index in range(min(right + 1, draft_tokens)):
            rate = self.rates.get(kind, _PRIOR_RATE)
            self.rates[kind] = rate + _RATE_WEIGHT * ((index < right) - rate)
        if right:
            self.wait = _FIRST_WAIT


class Speculation:
    """Adds draft tokens to plans and learns from their acceptance."""

    def __init__(
        self, proposer: Proposer, max_draft_tokens: int = 4, cost: StepCost | None = None
    ) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._proposer = proposer
        self._max_draft_tokens = max_draft_tokens
        self._cost = cost or StepCost()
        self._paces: dict[int, _Pace] = {}
        self._hopeless = 0
        self._untimed = False  # the current step's time is not counted
        self._kinds: dict[int, int] = {}  # of the current step's draft tokens

    def extend(
        self,
        plan: StepPlan,
        running: Mapping[int, TokenSequence],
        admissible: Callable[[SampleSpec, Sequence[int]], int],
        lend: Callable[[TokenSequence, int], int],
        max_step_tokens: int,
    ) -> StepPlan:
        """Return the plan with draft tokens added to rows that decode.

        Args:
            plan: Plan of the scheduler.
            running: Running sequences by id.
            admissible: Returns how many leading draft tokens a sample's grammar allows.
            lend: Makes room for draft tokens in a sequence's blocks; returns how many fit.
            max_step_tokens: Token limit of a step, draft tokens included.
        """
        self._kinds.clear()
        self._untimed = False
        self._paces = {i: pace for i, pace in self._paces.items() if i in running}
        self._proposer.retain(running)
        decoding = [i for i, row in enumerate(plan.rows) if _continues(row, running)]
        room = max_step_tokens - sum(row.cost_tokens for row in plan.rows)
        if not decoding or room < 1 or self._cost.needs_plain_step(len(decoding)):
            return plan
        cost = self._cost.share(len(decoding))
        if cost >= 1.0:  # even a right draft token costs the batch more than it gains
            self._hopeless += 1
            if self._hopeless % _PROBE_EVERY:
                return plan
            cost = _DRAFT_TOKEN_SHARE
            decoding = decoding[:1]
        sequences = [running[plan.rows[i].sequence_id] for i in decoding]
        candidates = [
            self._candidate(sequence, cost, min(self._max_draft_tokens, room))
            for sequence in sequences
        ]
        proposals = self._proposer.propose(candidates, room)
        self._untimed = self._proposer.untimed
        rows = list(plan.rows)
        for index, candidate, proposal in zip(decoding, candidates, proposals, strict=True):
            draft_tokens = list(proposal.tokens[:room])
            count = admissible(rows[index].samples[0], draft_tokens) if draft_tokens else 0
            count = lend(candidate.sequence, count) if count else 0
            if not count:
                continue
            room -= count
            self._kinds[rows[index].sequence_id] = proposal.kind
            rows[index] = _with_draft_tokens(rows[index], candidate.sequence, draft_tokens[:count])
        return replace(plan, rows=tuple(rows))

    def observe(
        self, plan: StepPlan, results: Sequence[Sequence[SampledToken]], duration_ns: int
    ) -> None:
        """Learn from a finished step."""
        draft_tokens = 0
        for row, sampled in zip(plan.rows, results, strict=True):
            if not row.num_draft_tokens:
                continue
            right = accepted_draft_tokens(row, sampled)
            draft_tokens += row.num_draft_tokens
            self.drafts += 1
            self.draft_tokens += row.num_draft_tokens
            self.accepted_tokens += right
            if pace := self._paces.get(row.sequence_id):
                pace.note(self._kinds.get(row.sequence_id, 0), row.num_draft_tokens, right)
        if all(row.decodes for row in plan.rows) and not self._untimed:
            self._cost.note(len(plan.rows), draft_tokens, duration_ns)

    def ban(self, sequence_id: int) -> None:
        """Stop draft tokens for a sequence whose row with draft tokens had NaN."""
        self._paces.setdefault(sequence_id, _Pace()).banned = True

    def _candidate(self, sequence: TokenSequence, cost: float, most: int) -> DraftCandidate:
        pace = self._paces.setdefault(sequence.sequence_id, _Pace())
        # a response's last token is never computed: nothing is proposed behind it
        most = min(most, sequence.request.spec.params.max_tokens - sequence.generated - 1)
        return DraftCandidate(sequence, lambda kind: pace.allowed(kind, cost, most))


class NgramProposer:
    """Proposer that copies what followed earlier occurrences of the newest 1 to 4 tokens.

    The ``_LOOK_BACK`` most recent positions with the same last token are compared. The longest
    match wins, the most recent among equals. A match that reaches the end repeats itself. The kind
    of a proposal is the length of its match.
    """

    untimed = False

    def __init__(self) -> None:
        self._indexes: dict[int, _PlaceIndex] = {}

    def propose(self, candidates: Sequence[DraftCandidate], budget_tokens: int) -> list[Proposal]:
        """Propose continuations of earlier matches; no computation."""
        return [self._one(candidate) for candidate in candidates]

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        """Forget all other sequences."""
        if any(i not in sequence_ids for i in self._indexes):
            self._indexes = {i: x for i, x in self._indexes.items() if i in sequence_ids}

    def _one(self, candidate: DraftCandidate) -> Proposal:
        tokens = candidate.sequence.tokens
        index = self._indexes.setdefault(candidate.sequence.sequence_id, _PlaceIndex())
        place, length = index.match(tokens)
        count = candidate.allowed(length) if length else 0
        draft_tokens: list[int] = []
        for position in range(place, place + count):
            beyond = position - len(tokens)
            draft_tokens.append(tokens[position] if beyond < 0 else draft_tokens[beyond])
        return Proposal(draft_tokens, length)


_LONGEST_MATCH = 4
_LOOK_BACK = 128


class _PlaceIndex:
    """Earlier positions of each token of a growing list; O(1) per token."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._before: list[int] = []  # by place; -1 for none

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return (position behind the best earlier match of the end, its length or 0)."""
        for place in range(len(self._before), len(tokens)):
            self._before.append(self._latest.get(tokens[place], -1))
            self._latest[tokens[place]] = place
        best = 0
        best_length = 0
        last = len(tokens) - 1
        place = self._before[last]
        for _ in range(_LOOK_BACK):
            if place < 0 or best_length == _LONGEST_MATCH:
                break
            length = 1
            while length < min(_LONGEST_MATCH, place + 1) and (
                tokens[place - length] == tokens[last - length]
            ):
                length += 1
            if length > best_length:
                best = place + 1
                best_length = length
            place = self._before[place]
        return best, best_length


def _continues(row: PlanRow, running: Mapping[int, TokenSequence]) -> bool:
    return row.decodes and running[row.sequence_id].generated > 0


def _with_draft_tokens(
    row: PlanRow, sequence: TokenSequence, draft_tokens: Sequence[int]
) -> PlanRow:
    (sample,) = row.samples
    samples = [
        replace(sample, history=[*sequence.tokens, *draft_tokens[:count]])
        for count in range(1, len(draft_tokens) + 1)
    ]
    return replace(
        row,
        tokens=[*row.tokens, *draft_tokens],
        block_ids=sequence.blocks[: blocks_for(row.start + 1 + len(draft_tokens))],
        samples=(sample, *samples),
        num_draft_tokens=len(draft_tokens),
    )
