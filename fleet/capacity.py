"""What a worker will need, and how much of it fits: `baton capacity`, before anything starts."""

from dataclasses import asdict, dataclass

from engine.footprint import Footprint, blocks_for, footprint, kv_geometry
from engine.text.model_config import ModelConfig, ModelError


@dataclass(frozen=True)
class Capacity:
    """One worker, in bytes where nothing else is said.

    Attributes:
        need: Without the KV pool.
        kv_bytes_per_token: K and V of all layers.
        kv_blocks: What the requests need.
        kv_bytes: The same in bytes.
        free: What is there.
        fitting_requests: Requests of that context that fit into ``free``.
    """

    context_tokens: int
    concurrency: int
    need: Footprint
    kv_bytes_per_token: int
    kv_blocks: int
    kv_bytes: int
    free: int
    fitting_requests: int

    @property
    def total(self) -> int:
        """What the engine process takes once its pool is full."""
        return self.need.total + self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether it is there, while loading too."""
        return max(self.total, self.need.total + self.need.loading) <= self.free

    def as_json(self) -> dict[str, object]:
        """Every figure, sums included."""
        sums = {"weights": self.need.weights, "total": self.total, "fits": self.fits}
        return {**asdict(self), **sums}


def plan_capacity(
    config: ModelConfig,
    *,
    context_tokens: int | None,
    concurrency: int,
    dtype: str,
    weights: str,
    kv: str,
    numerics: str,
    free_bytes: int,
) -> Capacity:
    """Count what one worker needs.

    Args:
        config: The model's numbers.
        context_tokens: Prompt and answer of each request; the model's limit if ``None``.
        concurrency: Requests at once.
        dtype: ``bf16`` or ``fp32``.
        weights: ``none``, ``int8`` or ``int4``.
        kv: ``none``, ``int8`` or ``fp8``.
        numerics: ``exact`` or ``fast``.
        free_bytes: What is there.

    Raises:
        ModelError: The model is not made for such a context.
    """
    context = context_tokens or config.max_context_tokens
    if context > config.max_context_tokens:
        raise ModelError(f"--context {context}: the model's limit is {config.max_context_tokens}")
    need = footprint(
        config,
        dtype=dtype,
        quantisation=weights,
        numerics=numerics,
        max_batch_requests=max(concurrency, 1),
        context=context,
    )
    one = kv_geometry(config, dtype if kv == "none" else kv, blocks_for(context))
    left = free_bytes - need.total
    return Capacity(
        context,
        concurrency,
        need,
        one.block_bytes // one.block_tokens,
        one.num_blocks * concurrency,
        one.pool_bytes * concurrency,
        free_bytes,
        max(0, left // one.pool_bytes),
    )
