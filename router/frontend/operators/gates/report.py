"""State of gates, as JSON for operators."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec

from baton.types.gates import GoldenRound, Tally
from router.lanes.comparison import p95_s, seconds_of
from router.lanes.gate import Gate


def gate_state(gate: Gate | None) -> dict[str, Any] | None:
    """Return the state of the gate of a canary or shadow; None without a gate."""
    if gate is None:
        return None
    return {
        "since_ms": gate.entry.since_ms,
        "canary": _tally(gate.totals.canary),
        "stable": _tally(gate.totals.stable),
        "golden": round_state(gate.last_round),
    }


def round_state(golden: GoldenRound | None) -> dict[str, Any] | None:
    """Return the result of a round of golden prompts; None if none has run."""
    if golden is None:
        return None
    return {**msgspec.structs.asdict(golden), "passed": golden.passed}


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "errors": tally.errors,
        "ttft_p95_s": p95_s(tally.ttft),
        "ttft": _cumulative(tally.ttft),
        "itl_p95_s": p95_s(tally.itl),
        "same": tally.same,
        "different": tally.different,
    }


def _cumulative(counts: Mapping[int, int]) -> list[tuple[float, float]]:
    """Return durations in seconds, each with the share of the requests that took no longer."""
    total = sum(counts.values())
    done = accumulate(counts[bucket] for bucket in sorted(counts))
    return [
        (round(seconds_of(bucket), 6), round(count / total, 4))
        for bucket, count in zip(sorted(counts), done, strict=True)
    ]
