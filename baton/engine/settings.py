"""How one engine is built: what its process is told at its start."""

from typing import Self

import msgspec

from baton.engine.core.speculative.proposers import SpeculationSettings


class EmulatedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is not there: how long it takes, and which tokens its answers hold.

    Attributes:
        timing: A name in ``baton.engine.emulated_timing.TIMINGS``.
        vocab_size: Of the model whose tokenizer the router uses; as are the two that follow.
    """

    timing: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int


class KvTierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV goes that the pool has no room for; 0: no such tier.

    Attributes:
        disk_folder: Of this worker alone.
        int8_chunks: Blocks may have come here as int8, so they are no others' who do without.
    """

    memory_mb: int = 0
    disk_mb: int = 0
    disk_folder: str = ""
    int8_chunks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers that are wanted, the fastest first."""
        sizes = {"memory": self.memory_mb, "disk": self.disk_mb}
        return tuple(name for name, size in sizes.items() if size)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to build one engine process."""

    model: str  # reference as in the config, or "emulated"
    dtype: str = "bf16"
    numerics: str = "exact"
    native: str = "auto"  # see baton.engine.cpu.native.library
    weight_quantisation: str = "none"  # or "int8", "int4"; on CUDA "fp8"
    kv_dtype: str = ""  # "int8", "fp8"; empty = as the activations
    kv_blocks: int = 1024  # 0 = sized from the memory that is free
    kv_tiers: KvTierSettings = KvTierSettings()
    workers_on_host: int = 1  # that share it
    device: str = "cpu"  # "cpu", "cuda", or "auto": CUDA where torch sees a GPU
    threads: int = 1  # of a rank; 0: its part of the cores, and others' while they are idle
    lends_cores: bool = False  # whether ``threads`` came from 0
    max_context_tokens: int = 0
    max_batch_requests: int = 32
    max_step_tokens: int = 512
    max_adapters: int = 0  # held at once; 0: none are served
    max_adapter_rank: int = 64
    check_every_step: bool = False  # tests: recount all blocks after each step
    speculation: SpeculationSettings = SpeculationSettings()
    tensor_parallel: int = 1  # ranks of this replica
    rank_memory: str = "shared"  # or "own": a pool for each rank, of its KV heads only
    rank_orders: tuple[str, ...] = ()  # HOST:PORT/SECRET of ranks 1 and up; none: our children
    rank_meeting_port: int = 0  # where those find each other, on the leader's host; 0: any
    emulated: EmulatedModel | None = None  # in place of ``model``, in a thread of the shell
    emulated_token_s: float = 0.0
    emulated_nan_after_steps: int = 0
    poison_token: int = -1  # drills: the process dies when a prompt holds this token

    @property
    def own_pools(self) -> bool:
        """Whether each rank has a KV pool of its own."""
        return self.tensor_parallel > 1 and self.rank_memory == "own"

    @property
    def steps_on_cpu(self) -> bool:
        """Whether a step needs this host's cores, and so whatever else does takes from it."""
        return self.device == "cpu" and self.emulated is None and self.model != "emulated"

    def on(self, cores: int) -> Self:
        """The same with its number of threads, on a host with so many cores."""
        if self.threads:
            return self
        own = max(1, cores // (self.workers_on_host * self.tensor_parallel))
        return msgspec.structs.replace(self, threads=own, lends_cores=True)
