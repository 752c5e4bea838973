"""Metric of the KV cache's size."""

from baton.telemetry.metrics import Metrics


def set_cache_info(metrics: Metrics, blocks: int, block_tokens: int, dtype: str = "auto") -> None:
    """Export the number of KV blocks, of a fleet or of one worker."""
    metrics.set_info(
        "baton_kv_cache_info",
        1,
        block_size=str(block_tokens),
        num_gpu_blocks=str(blocks),
        num_cpu_blocks="0",
        cache_dtype=dtype,
        enable_prefix_caching="True",
    )
