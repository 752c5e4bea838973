"""Speculation: propose the next tokens of an answer, and compute them all in one step.

    tokens of a row   [ last token | draft token 1 | draft token 2 | draft token 3 ]
    sampled           [     a      |       b       |       c       |       d       ]
    a == draft token 1, b == draft token 2, c != draft token 3:   the answer grows by a, b, c

What is sampled at a position is a function of the tokens before it (and of seed, choice, position).
So right draft tokens save steps and wrong ones cost time, and in ``numerics: exact`` neither shows
in the tokens. Whether draft tokens pay is decided per request and step, from the share of them that
was right lately and from the measured time that one more costs everybody in the batch.
Pure: durations come from outside.
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

_ANY_KIND = 0.6  # prior for the share of right draft tokens
_LEARN = 0.2
# chances let pass before the next trial
_FIRST_WAIT = 32
_LONGEST_WAIT = 1024
_TRIAL_DRAFT_TOKENS = 2
_DRAFT_TOKEN_SHARE = 0.05  # prior: a draft token costs this part of a plain step of one request
_PLAIN_EVERY = 64  # steps with draft tokens after which a plain one is timed again
_PROBE_EVERY = 256  # steps in which no draft token could pay, after which one is timed again


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker speculates with."""

    mode: str = "off"  # "off" | "ngram" | "draft"
    draft: str = ""  # reference of the draft model
    tokens: int = 4  # most draft tokens per step and sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence; proposals of one ``kind`` are equally trustworthy."""

    tokens: Sequence[int] = ()
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may get draft tokens; ``allowed(kind)`` says how many of a kind pay."""

    sequence: TokenSequence
    allowed: Callable[[int], int]


class Proposer(Protocol):
    """Where draft tokens come from."""

    @property
    def untimed(self) -> bool:
        """Whether the last call did work that other steps do not have; its time is not counted."""

    def propose(self, candidates: Sequence[Candidate], budget_tokens: int) -> list[Proposal]:
        """One proposal per candidate, possibly empty.

        Args:
            candidates: Running sequences that decode in this step.
            budget_tokens: Tokens that may be computed for it, beside the draft tokens.
        """

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        """Forget all other sequences."""


class StepCost:
    """What a draft token costs, as a share of a step without draft tokens. Fitted."""

    def __init__(self) -> None:
        self._plain_ns: dict[int, RunningMean] = {}  # by decode rows
        self._since_plain: dict[int, int] = {}
        self._draft_token_ns = RunningMean(0.1)

    def note(self, decodes: int, draft_tokens: int, duration_ns: int) -> None:
        """Learn from a step that computed nothing but ``decodes`` rows and their draft tokens."""
        plain_ns = self._plain_ns.get(decodes)
        if not draft_tokens:
            self._since_plain[decodes] = 0
            self._plain_ns.setdefault(decodes, RunningMean(0.3)).add(duration_ns)
        elif plain_ns is not None:
            self._since_plain[decodes] += 1
            sample_ns = max(duration_ns - plain_ns.value, 0.0) / draft_tokens
            self._draft_token_ns.add(min(sample_ns, 2 * plain_ns.value))

    def wants_plain(self, decodes: int) -> bool:
        """Whether a step without draft tokens should be timed before the next one with some."""
        return self._since_plain.get(decodes, _PLAIN_EVERY) >= _PLAIN_EVERY

    def share(self, decodes: int) -> float:
        """Answer tokens that ``decodes`` rows lose by the time which one draft token takes."""
        plain_ns = self._plain_ns.get(decodes)
        if plain_ns is None or not self._draft_token_ns.measured:
            return _DRAFT_TOKEN_SHARE * decodes
        return decodes * self._draft_token_ns.value / max(plain_ns.value, 1.0)


@dataclass(slots=True)
class _Pace:
    """How well draft tokens did for one sequence; says how many pay now."""

    rates: dict[int, float] = field(default_factory=dict)  # by kind: share of right draft tokens
    passed: int = 0
    wait: int = _FIRST_WAIT
    banned: bool = False

    def allowed(self, kind: int, cost: float, most: int) -> int:
        """Draft tokens whose chance is worth their cost; once in a while a few, if none is."""
        if self.banned or most < 1:
            return 0
        rate = self.rates.get(kind, _ANY_KIND)
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
        """Learn from a verified proposal."""
        for index in range(min(right + 1, draft_tokens)):
            rate = self.rates.get(kind, _ANY_KIND)
            self.rates[kind] = rate + _LEARN * ((index < right) - rate)
        if right:
            self.wait = _FIRST_WAIT


class Speculation:
    """Puts draft tokens into plans and learns from what became of them.

    Args:
        proposer: Where draft tokens come from.
        max_draft_tokens: Per sequence and step.
        cost: What draft tokens cost.
    """

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
        self._untimed = False  # the time of the step under way is not counted
        self._kinds: dict[int, int] = {}  # of the draft tokens in the step under way

    def extend(
        self,
        plan: StepPlan,
        running: Mapping[int, TokenSequence],
        admissible: Callable[[SampleSpec, Sequence[int]], int],
        lend: Callable[[TokenSequence, int], int],
        max_step_tokens: int,
    ) -> StepPlan:
        """The plan with draft tokens behind the rows that decode.

        Args:
            plan: Of the scheduler.
            running: Sequences by id.
            admissible: Says how many of the draft tokens a sequence's grammar would let pass.
            lend: Makes room in a sequence's blocks for draft tokens; returns how many fit.
            max_step_tokens: Most tokens of a step, draft tokens included.
        """
        self._kinds.clear()
        self._untimed = False
        self._paces = {i: pace for i, pace in self._paces.items() if i in running}
        self._proposer.retain(running)
        decoding = [i for i, row in enumerate(plan.rows) if _continues(row, running)]
        room = max_step_tokens - sum(row.cost_tokens for row in plan.rows)
        if not decoding or room < 1 or self._cost.wants_plain(len(decoding)):
            return plan
        cost = self._cost.share(len(decoding))
        if cost >= 1.0:  # even one that is surely right costs the batch more than it gains
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
        """No more draft tokens for a sequence: it met NaN with some, so it goes on without."""
        self._paces.setdefault(sequence_id, _Pace()).banned = True

    def _candidate(self, sequence: TokenSequence, cost: float, most: int) -> Candidate:
        pace = self._paces.setdefault(sequence.sequence_id, _Pace())
        # an answer's last token is sampled and never computed: nothing is proposed behind it
        most = min(most, sequence.request.spec.params.max_tokens - sequence.generated - 1)
        return Candidate(sequence, lambda kind: pace.allowed(kind, cost, most))


class NgramProposer:
    """Looks up how the answer went on the last time that its newest 1 to 4 tokens stood there.

    Every token knows the place before where it stood too; the most recent ``_LOOK_BACK`` such
    places are compared, and the longest match wins, the most recent one among equals. A match that
    is still going on repeats itself. The kind of a proposal is the length of its match.
    """

    untimed = False

    def __init__(self) -> None:
        self._indexes: dict[int, _PlaceIndex] = {}

    def propose(self, candidates: Sequence[Candidate], budget_tokens: int) -> list[Proposal]:
        """See ``Proposer``; computes nothing."""
        return [self._one(candidate) for candidate in candidates]

    def retain(self, sequence_ids: Mapping[int, TokenSequence]) -> None:
        """See ``Proposer``."""
        if any(i not in sequence_ids for i in self._indexes):
            self._indexes = {i: x for i, x in self._indexes.items() if i in sequence_ids}

    def _one(self, candidate: Candidate) -> Proposal:
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
    """For each token of a growing list, where the same token stood before; O(1) per token."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        self._before: list[int] = []  # by place; -1 for none

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(place behind the best earlier match of the list's end, its length or 0)."""
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
