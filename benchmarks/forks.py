"""Forks of agents beside other traffic, and sessions that pause.

A fork is a session that starts many others at once: they share a long prompt, and each adds a
message of its own. Short requests of others arrive before, during and after it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from loadtest.client.records import CallRecord
from loadtest.metrics.request_figures import ttft_s
from loadtest.metrics.summary import Distribution
from loadtest.workloads.agents import Agents, agent_plan
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.prompts import UNIQUE_KEYS

OTHERS = "others"
_OTHER_KEYS = UNIQUE_KEYS + (1 << 24)


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A fork, and the other traffic beside it."""

    siblings: int = 43
    prefix_tokens: int = 19_000
    own_tokens: int = 100
    answer_tokens: int = 32
    tools: int = 24
    start_s: float = 4.0
    spread_s: float = 0.05  # over which the siblings arrive
    others_per_s: float = 4.0
    others_tokens: int = 400
    others_until_s: float = 16.0


class ForkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a fork.

    Attributes:
        prefix_cached: Cached share of the prefix tokens of all siblings but the first.
        computed: Number of siblings that computed most of the prefix.
        ttft_to_alone: 90th percentile of the siblings' TTFT ÷ TTFT of a single one.
    """

    prefix_cached: float
    computed: int
    alone_s: float
    ttft_s: Distribution
    ttft_to_alone: float
    others_ttft_s: Distribution | None


def fork_plan(load: Fork, seed: int) -> Plan:
    """Return the plan of a fork with other traffic; others have the group ``OTHERS``."""
    agents = Agents(
        sessions=load.siblings,
        turns=1,
        tools=load.tools,
        system_tokens=load.prefix_tokens,
        shared=True,
        turn_tokens=str(load.own_tokens),
        result_bytes=1 << 20,
        answer_tokens=str(load.answer_tokens),
        think_s=0.0,
        ramp_s=load.spread_s,
    )
    plan = agent_plan(agents, name="fork", seed=seed)
    siblings = [
        msgspec.structs.replace(c, start_s=c.start_s + load.start_s) for c in plan.conversations
    ]
    count = round(load.others_per_s * load.others_until_s)
    starts_s = np.sort(np.random.default_rng(seed).uniform(0, load.others_until_s, count))
    others = [
        Conversation(
            start_s=float(start_s),
            turns=(
                Turn(
                    index=load.siblings + number,
                    prompt=(Segment(_OTHER_KEYS + seed * 1000 + number, load.others_tokens),),
                    max_tokens=load.answer_tokens,
                    group=OTHERS,
                ),
            ),
        )
        for number, start_s in enumerate(starts_s)
    ]
    return msgspec.structs.replace(plan, conversations=(*siblings, *others))


def fork_figures(load: Fork, alone: CallRecord, records: Sequence[CallRecord]) -> ForkFigures:
    """Return the figures of a fork.

    Raises:
        ValueError: A request failed, or the server does not count cached tokens.
    """
    if any(record.end != "ok" or record.cached_tokens is None for record in records):
        ends = Counter(record.end for record in records)
        raise ValueError(f"requests failed, or cached tokens were not counted: {dict(ends)}")
    siblings = sorted(
        (record for record in records if record.group != OTHERS), key=lambda r: r.sent_s
    )
    others = [record for record in records if record.group == OTHERS]
    shares = [
        min((record.cached_tokens or 0) / ((record.prompt_tokens or 1) - load.own_tokens), 1.0)
        for record in siblings
    ]
    first_s = Distribution.of(s for s in map(ttft_s, siblings) if s is not None)
    alone_s = ttft_s(alone)
    if first_s is None or not alone_s:
        raise ValueError("no first token was seen")
    times_s = sorted(s for s in map(ttft_s, siblings) if s is not None)
    return ForkFigures(
        prefix_cached=(sum(shares) - min(shares)) / max(len(shares) - 1, 1),
        computed=sum(share < 0.5 for share in shares),
        alone_s=alone_s,
        ttft_s=first_s,
        ttft_to_alone=times_s[int(0.9 * (len(times_s) - 1))] / alone_s,
        others_ttft_s=Distribution.of(s for s in map(ttft_s, others) if s is not None),
    )


class PacedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of sessions with pauses; ``max_to_mean`` is of the requests of each worker."""

    requests: dict[str, int]
    max_to_mean: float
    cached: float
    ttft_s: Distribution | None


def paced_figures(url: str, workers: int, records: Sequence[CallRecord]) -> PacedFigures:
    """Return the figures of the fleet's latest requests, which these records are of."""
    requests: Counter[str] = Counter()
    for record in records:
        report = f"{url}/fleet/requests/{record.request_id}"
        told = httpx.get(report, timeout=10, trust_env=False).json()
        requests[told["route"]["prefill"] or told["route"]["decode"]] += 1
    return PacedFigures(
        requests=dict(sorted(requests.items())),
        max_to_mean=max(requests.values()) * workers / sum(requests.values()),
        cached=sum(record.cached_tokens or 0 for record in records)
        / sum(record.prompt_tokens or 0 for record in records),
        ttft_s=Distribution.of(s for s in map(ttft_s, records) if s is not None),
    )
