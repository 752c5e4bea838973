"""Counts prompt tokens by where their KV came from."""

from collections.abc import Mapping

from baton.telemetry.metrics import Metrics


def count_cached(metrics: Metrics, tier_tokens: Mapping[str, int], cached_tokens: int) -> None:
    """Count tokens of a prompt that needed no computing.

    Args:
        metrics: Of the worker.
        tier_tokens: What tiers gave back of it, by tier.
        cached_tokens: All of them; those that no tier gave back were in the pool.
    """
    left = cached_tokens
    for tier, brought in tier_tokens.items():
        tokens = min(brought, left)  # what was brought back may have been evicted once more
        metrics.inc("baton_prefix_tokens", tokens, source=tier)
        left -= tokens
    metrics.inc("baton_prefix_tokens", left, source="local")
