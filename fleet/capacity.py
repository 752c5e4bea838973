"""What a worker will need, and how much of it fits: `baton capacity`, before anything starts."""

from dataclasses import asdict, dataclass

from baton.engine.core.sequence import blocks_for
from baton.engine.cpu.native.library import load
from baton.engine.loading.memory import Footprint, footprint, kv_geometry
from baton.model.model_config import ModelConfig, ModelError


@dataclass(frozen=True)
class Capacity:
    """One worker, in bytes where nothing else is said.

    Attributes:
        need: Without the KV pool.
        kv_bytes_per_token: K and V of all layers; the draft model's too.
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
        """What the engine takes once its pool is full."""
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
    tensor_parallel: int = 1,
    draft: ModelConfig | None = None,
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
        tensor_parallel: Ranks of the worker, all on one machine.
        draft: The numbers of the draft model.

    Raises:
        ModelError: The model is not made for such a context, or cannot be split that far.
    """
    context = context_tokens or config.max_context_tokens
    if context > config.max_context_tokens:
        raise ModelError(f"--context {context}: the model's limit is {config.max_context_tokens}")
    if tensor_parallel > 1 and weights == "int4":
        raise ModelError("--tensor-parallel: int4 weights are not split over ranks; int8 ones are")
    need = footprint(
        config,
        dtype=dtype,
        quantisation=weights,
        numerics=numerics,
        max_batch_requests=max(concurrency, 1),
        context=context,
        ranks=tensor_parallel,
        draft=draft,
        native=load() is not None,
    )
    blocks = blocks_for(context)
    pools = [kv_geometry(config, dtype if kv == "none" else kv, blocks)]
    if draft is not None:  # as many blocks, never quantised
        pools.append(kv_geometry(draft, dtype, blocks))
    request_bytes = sum(pool.pool_bytes for pool in pools)
    left = free_bytes - need.total
    return Capacity(
        context,
        concurrency,
        need,
        sum(pool.block_bytes // pool.block_tokens for pool in pools),
        blocks * concurrency,
        request_bytes * concurrency,
        free_bytes,
        max(0, left // request_bytes),
    )
