"""Load in phases of different rates, and what became of the requests of each. Does no I/O.

A response is good if its first token comes within ``ttft_s`` plus twice the prompt's own time, at
``itl_s`` per later token on average, counted from the first token or from a second one in time: the
definition of the fleet (`baton.types.slo.Slo`), by the client's clock.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from loadtest.client.records import CallRecord
from loadtest.metrics.summary import LatencyGoals
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

PROMPT_TOKENS = 1500
"""Length of every prompt: long enough that workers are busy before the machine of a test is."""

ANSWER_TOKENS = 64
_REFUSED = 429


class GoodLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a good response, in seconds; ``own_s`` is the TTFT of a prompt alone."""

    ttft_s: float
    itl_s: float
    own_s: float = 0.0

    def slo(self) -> LatencyGoals:
        """Return the limits of this load's prompts, which all have the same length."""
        ttft_s = self.ttft_s + 2 * self.own_s
        return LatencyGoals(ttft_s=ttft_s, tpot_s=self.itl_s, from_second=True)


class LoadPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a load with one rate, in requests per second."""

    name: str
    rate: float
    begin_s: float
    end_s: float


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests that were planned in a phase, by outcome.

    Attributes:
        seconds: Length of the phase.
        refused: Requests that got 429.
        late: Complete responses that missed a limit.
        failed: Requests with any other end.
    """

    name: str
    rate: float
    seconds: float
    sent: int
    good: int
    refused: int
    late: int
    failed: int

    @property
    def good_per_s(self) -> float:
        """Good responses per second."""
        return self.good / self.seconds

    @property
    def good_share(self) -> float:
        """Good responses as a share of the requests sent; 0 without requests."""
        return self.good / max(self.sent, 1)

    @property
    def good_of_admitted(self) -> float:
        """Good responses as a share of the requests that were not refused; 1 without any."""
        admitted = self.sent - self.refused
        return self.good / admitted if admitted else 1.0


def phases_of(rates: Sequence[tuple[str, float, float]]) -> list[LoadPhase]:
    """Return consecutive phases from names, rates and lengths in seconds."""
    phases: list[LoadPhase] = []
    begin_s = 0.0
    for name, rate, seconds in rates:
        end_s = begin_s + seconds
        phases.append(LoadPhase(name=name, rate=rate, begin_s=begin_s, end_s=end_s))
        begin_s = end_s
    return phases


def phased_plan(phases: Sequence[LoadPhase], seed: int) -> Plan:
    """Return a plan with random arrivals: rate × length requests in each phase.

    Prompts of another seed have other words, so that no cache has them.
    """
    rng = np.random.default_rng(seed)
    starts_s: list[float] = []
    for phase in phases:
        seconds = phase.end_s - phase.begin_s
        count = max(round(phase.rate * seconds), 1)
        drawn = np.sort(rng.random(count))
        starts_s += [phase.begin_s + seconds * float(share) for share in drawn]
    turns = [
        Turn(
            index=index,
            prompt=(Segment(UNIQUE_KEYS + index, PROMPT_TOKENS),),
            max_tokens=ANSWER_TOKENS,
        )
        for index in range(len(starts_s))
    ]
    return Plan(
        name="phases",
        seed=seed,
        conversations=tuple(
            Conversation(start_s=start_s, turns=(turn,))
            for start_s, turn in zip(starts_s, turns, strict=True)
        ),
    )


def is_refused(record: CallRecord) -> bool:
    """Return whether the server refused the request because of load."""
    return record.end == "http_error" and record.status == _REFUSED


def figures_of(phase: LoadPhase, records: Sequence[CallRecord], limits: GoodLimits) -> PhaseFigures:
    """Return the figures of a phase; records of other phases are ignored."""
    slo = limits.slo()
    own = [record for record in records if phase.begin_s <= record.intended_s < phase.end_s]
    good = sum(slo.met_by(record) for record in own)
    refused = sum(map(is_refused, own))
    answered = sum(record.end == "ok" for record in own)
    return PhaseFigures(
        name=phase.name,
        rate=phase.rate,
        seconds=phase.end_s - phase.begin_s,
        sent=len(own),
        good=good,
        refused=refused,
        late=answered - good,
        failed=len(own) - answered - refused,
    )
