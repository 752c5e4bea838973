"""Metric of prompt tokens by source of their KV."""

from collections.abc import Mapping

from baton.telemetry.metrics import Metrics


def count_cached(metrics: Metrics, tier_tokens: Mapping[str, int], cached_tokens: int) -> None:
    """Count prompt tokens from tiers; the other cached tokens were in the pool."""
    left = cached_tokens
    for tier, brought in tier_tokens.items():
        tokens = min(brought, left)  # a restored block may have been evicted again
        metrics.inc("baton_prefix_tokens", tokens, source=tier)
        left -= tokens
    metrics.inc("baton_prefix_tokens", left, source="local")
