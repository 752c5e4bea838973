"""Merges the answers of several routers to one question. Sans-IO."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

_COUNTED = (
    *("generated_tokens", "prompt_tokens", "ended", "failed", "refused", "errors"),
    *("queued", "running"),
)
_DEFAULT_LIMIT = 50


def load_of(parts: list[Any], asked: Mapping[str, str]) -> dict[str, int]:
    """Merge ``GET /load``: all requests that have not ended."""
    return {"server_load": sum(part["server_load"] for part in parts)}


def latest_of(parts: list[Any], asked: Mapping[str, str]) -> dict[str, Any]:
    """Merge ``GET /fleet/requests``: the newest or slowest of all.

    Each router gives ages as of its own time; the result has ages as of the latest one. Routers of
    a group are on one host, and have one monotonic clock.
    """
    at_s = max(part.get("at_s", 0.0) for part in parts)  # missing in the version before
    lines = [
        {**request, "age_s": round(request["age_s"] + at_s - part.get("at_s", at_s), 6)}
        for part in parts
        for request in part["requests"]
    ]
    if asked.get("order") == "slowest":
        lines.sort(key=lambda request: -float(request["elapsed_s"]))
    else:
        lines.sort(key=lambda request: float(request["age_s"]))
    return {"at_s": at_s, "requests": lines[: int(asked.get("limit", _DEFAULT_LIMIT))]}


def series_of(parts: list[Any], asked: Mapping[str, str]) -> dict[str, Any]:
    """Merge ``GET /fleet/series``: each second that all routers have closed gives one sample.

    Samples of the same second have the same number in all routers. Percentiles cannot be merged
    exactly: p50 is the mean weighted by tokens, p99 the maximum.
    """
    last = min(part["last"] for part in parts)
    seconds: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for part in parts:
        for sample in part["samples"]:
            if sample["number"] <= last:
                seconds[sample["number"]].append(sample)
    samples = [_second(seconds[number]) for number in sorted(seconds)]
    return {**parts[0], "last": last, "samples": samples}


def _second(samples: list[dict[str, Any]]) -> dict[str, Any]:
    if len(samples) == 1:
        return samples[0]
    handoffs: Counter[str] = Counter()
    limited: Counter[str] = Counter()
    for sample in samples:
        handoffs.update(sample["handoffs"])
        limited.update(sample.get("limited", {}))  # missing in the version before
    return {
        **samples[0],
        **{name: sum(sample.get(name, 0) for sample in samples) for name in _COUNTED},
        **{name: _weighted_mean(samples, name) for name in ("ttft_p50_s", "itl_p50_s")},
        **{name: _maximum(samples, name) for name in ("ttft_p99_s", "itl_p99_s")},
        "handoffs": dict(handoffs),
        "limited": dict(limited),
        "last_turn": max(sample.get("last_turn", 0) for sample in samples),
    }


def _weighted_mean(samples: list[dict[str, Any]], name: str) -> float | None:
    known = [(sample[name], sample["generated_tokens"] + 1) for sample in samples if sample[name]]
    weight = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / weight if known else None


def _maximum(samples: list[dict[str, Any]], name: str) -> float | None:
    return max((sample[name] for sample in samples if sample[name] is not None), default=None)
