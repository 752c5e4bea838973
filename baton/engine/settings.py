"""Settings of one engine process, passed to it at its start."""

import os
from typing import Self

import msgspec

from baton.control_groups import cpu_quota
from baton.engine.core.speculative.proposers import SpeculationSettings

ENGINE_MODULES = {
    "": "baton.engine.process.step_loop",
    "vllm": "baton.engine.vllm.process",
}
"""Modules of engine processes by ``ExternalEngine.kind``, "" for Baton's own engine.

All have the arguments of the first one, and speak ``baton.engine.process.messages``."""

EXTERNAL_KINDS = ("vllm", "llama-server")
"""Engines that are not Baton's. Their numerics ids begin with the kind."""


def default_device() -> str:
    """Return the device of engines: ``BATON_DEVICE``, or the CPU."""
    return os.environ.get("BATON_DEVICE", "cpu")


class EmulatedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Emulated model: its timing and the tokens of its responses.

    Attributes:
        timing: Name in ``baton.engine.emulated_timing.TIMINGS``.
        vocab_size: Vocabulary of the model whose tokenizer the router uses, as are the next two.
    """

    timing: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int


class ExternalEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Engine program that is installed by itself, such as vLLM.

    Attributes:
        kind: Name in ``ENGINE_MODULES``.
        python: Interpreter in whose environment it is installed.
        args: Further arguments of its server.
        adapters: Whether it serves LoRA adapters.
        hand_off: How it moves KV to other workers by itself; empty: it does not.
        role: Role of the worker in hand-offs, ``prefill`` or ``decode``; empty: both.
        address: HOST:PORT at which other workers' engines ask for KV.
        ports: Allowed range FIRST-LAST of further ports; empty: any.
        batch_invariant: Whether its batch-invariant mode is turned on.
    """

    kind: str
    python: str
    args: tuple[str, ...] = ()
    adapters: bool = False
    hand_off: str = ""
    role: str = ""
    address: str = ""
    ports: str = ""
    batch_invariant: bool = False


class KvTierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the KV tiers below the pool; 0 for no such tier.

    Attributes:
        disk_folder: Folder of this worker alone.
        disk_shared: Folders of other workers beside it are read.
        int8_chunks: Blocks may have arrived as int8, so workers without int8 cannot use them.
    """

    memory_mb: int = 0
    disk_mb: int = 0
    disk_folder: str = ""
    disk_shared: bool = False
    int8_chunks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configured tiers, the fastest first."""
        sizes = {"memory": self.memory_mb, "disk": self.disk_mb}
        return tuple(name for name, size in sizes.items() if size)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to build one engine process."""

    model: str  # reference as in the config, or "emulated"
    dtype: str = "bf16"
    numerics: str = "exact"
    native: str = "auto"  # see baton.engine.cpu.native.library
    weight_quantisation: str = "none"  # or "int8", "int4"; on CUDA "fp8"
    kv_dtype: str = ""  # "int8", "fp8"; empty: dtype of the activations
    kv_blocks: int = 1024  # 0: sized from the free memory
    kv_blocks_before: int = 0  # largest pool of the worker's earlier processes; 0: none
    kv_tiers: KvTierSettings = KvTierSettings()
    workers_on_host: int = 1  # workers that share the host
    device: str = "cpu"  # "cpu", "cuda", or "auto": CUDA where torch sees a GPU
    threads: int = 1  # per rank; 0: its share of the cores, plus idle cores of others
    lends_cores: bool = False  # whether ``threads`` was 0
    max_context_tokens: int = 0
    max_batch_requests: int = 32
    max_step_tokens: int = 512
    max_adapters: int = 0  # limit of loaded adapters; 0: none are served
    max_adapter_rank: int = 64
    sleeps: bool = False  # the memory of the KV pool is given back while the worker is idle
    check_every_step: bool = False  # tests: recount all blocks after each step
    speculation: SpeculationSettings = SpeculationSettings()
    tensor_parallel: int = 1  # ranks of this replica
    rank_memory: str = "shared"  # or "own": one pool per rank, of its KV heads only
    external: ExternalEngine | None = None  # runs the model instead of Baton's own engine
    emulated: EmulatedModel | None = None  # replaces ``model``; runs in a thread of the shell
    emulated_token_s: float = 0.0
    emulated_nan_after_steps: int = 0

    @property
    def own_pools(self) -> bool:
        """Return whether each rank has its own KV pool."""
        return self.tensor_parallel > 1 and self.rank_memory == "own"

    @property
    def steps_on_cpu(self) -> bool:
        """Return whether steps compete with other work for this host's cores."""
        own = self.emulated is None and self.external is None and self.model != "emulated"
        return own and self.device == "cpu"

    def on(self, cores: int) -> Self:
        """Return the settings with the number of threads for a host with so many cores.

        A smaller CPU quota of this process's control groups takes their place.
        """
        if self.threads:
            return self
        cores = min(cores, cpu_quota() or cores)
        own = max(1, cores // (self.workers_on_host * self.tensor_parallel))
        return msgspec.structs.replace(self, threads=own, lends_cores=True)
