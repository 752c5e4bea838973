"""Memory that one worker needs, computed for `baton capacity` before anything starts."""

from dataclasses import asdict, dataclass

from baton.engine.core.sequence import blocks_for
from baton.engine.cpu.native.library import is_expected, widens_bf16
from baton.engine.loading.memory import EngineShape, Footprint, footprint, kv_geometry
from baton.model.model_config import ModelConfig, ModelError
from fleet.cli.capacity_options import CapacityOptions


@dataclass(frozen=True)
class Capacity:
    """Memory of one worker in bytes.

    Attributes:
        need: Everything but the KV pool.
        kv_bytes_per_token: K and V of all layers, with those of the draft model.
        kv_blocks: Blocks that the requests need.
        fitting_requests: Requests of this context that fit into ``free``.
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
        """Memory of the engine once its KV pool is full."""
        return self.need.total + self.kv_bytes

    @property
    def fits(self) -> bool:
        """Return whether the memory suffices, also while loading."""
        return max(self.total, self.need.total + self.need.loading) <= self.free

    def as_json(self) -> dict[str, object]:
        """Return all figures and their sums."""
        sums = {"weights": self.need.weights, "total": self.total, "fits": self.fits}
        return {**asdict(self), **sums}


def plan_capacity(
    config: ModelConfig, options: CapacityOptions, free_bytes: int, draft: ModelConfig | None = None
) -> Capacity:
    """Compute the memory of one worker; ``draft`` is its draft model.

    Raises:
        ModelError: The context exceeds the model's limit, or the model cannot be split so far.
    """
    context = options.context or config.max_context_tokens
    if context > config.max_context_tokens:
        raise ModelError(
            f"--context {context} exceeds the model's limit, {config.max_context_tokens}"
        )
    if options.tensor_parallel > 1 and options.weights == "int4":
        raise ModelError("--tensor-parallel: int4 weights cannot be split over ranks: use int8")
    shape = EngineShape(
        config,
        dtype=options.dtype,
        quantisation=options.weights,
        numerics=options.numerics,
        max_batch_requests=max(options.concurrency, 1),
        context=context,
        ranks=options.tensor_parallel,
        draft=draft,
        native=is_expected(),
        widened=widens_bf16(),
    )
    need = footprint(shape)
    blocks = blocks_for(context)
    pools = [kv_geometry(config, options.dtype if options.kv == "none" else options.kv, blocks)]
    if draft is not None:  # same number of blocks, never quantised
        pools.append(kv_geometry(draft, options.dtype, blocks))
    request_bytes = sum(pool.pool_bytes for pool in pools)
    left = free_bytes - need.total
    return Capacity(
        context,
        options.concurrency,
        need,
        sum(pool.block_bytes // pool.block_tokens for pool in pools),
        blocks * options.concurrency,
        request_bytes * options.concurrency,
        free_bytes,
        max(0, left // request_bytes),
    )
