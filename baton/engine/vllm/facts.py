"""Properties of a running vLLM, as it reports them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.engine.loading.memory import kv_geometry
from baton.model.artifact import ModelArtifact
from baton.types.errors import InternalError
from baton.types.geometry import BLOCK_TOKENS, KvGeometry

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "fp8": "fp8", "int8": "int8"}


class VllmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a running vLLM.

    Attributes:
        block_tokens: Tokens of one of its blocks.
        width: Ranks of its tensor parallelism times those of its pipeline.
        step_tokens: Largest number of tokens of an engine step.
        batch_invariant: Whether its batch-invariant mode is on.
        hand_off: Way of its KV to other vLLMs, see ``hand_off_id``; empty: there is none.
        exact: Digest of bits that it computes on every path; empty: ``exact`` was not proven.
    """

    version: str
    block_tokens: int
    blocks: int
    max_context_tokens: int
    dtype: str
    kv_dtype: str
    attention: str
    width: int
    step_tokens: int
    batch_invariant: bool = False
    hand_off: str = ""
    exact: str = ""

    @property
    def numerics_id(self) -> str:
        """Id that is equal for workers whose KV and tokens are comparable.

        Sums depend on the width, so ``exact`` has it.
        """
        proven = f"/tp{self.width}/exact/{self.exact}" if self.exact else ""
        return f"vllm/{self.version}/{self.dtype}/{self.kv_dtype}/{self.attention}{proven}"

    @property
    def pool_blocks(self) -> int:
        """Number of Baton's blocks in the KV pool."""
        return self.blocks * self.block_tokens // BLOCK_TOKENS

    def geometry(self, artifact: ModelArtifact) -> KvGeometry:
        """Return the shape of the KV pool in Baton's blocks.

        Raises:
            InternalError: Its blocks cannot be divided into Baton's.
        """
        if self.block_tokens % BLOCK_TOKENS:
            raise InternalError(
                f"vLLM's block size is {self.block_tokens}, which is not a multiple of "
                f"{BLOCK_TOKENS}: set `--block-size` in pools.vllm.args"
            )
        return kv_geometry(artifact.config, self.kv_dtype, self.pool_blocks)


def hand_off_id(kind: str, block_tokens: int, width: int) -> str:
    """Return what two workers must share to hand over, beside their numerics; "" for no hand-off.

    The numerics id has vLLM's version, which determines the version of the connector. Pages of
    ``baton`` have the heads of all ranks, so the width does not matter there.
    """
    if not kind:
        return ""
    return f"{kind}/block{block_tokens}" + (f"/tp{width}" if kind == "nixl" else "")


def facts_of(version: str, info: Mapping[str, Any]) -> VllmFacts:
    """Return the properties that ``/server_info`` reports."""
    config = info["vllm_config"]
    cache = config["cache_config"]
    model = config["model_config"]
    parallel = config["parallel_config"]
    device = config["device_config"]["device"]
    backend = config["attention_config"]["backend"] or "auto"
    dtype = _dtype(model["dtype"])
    kv = cache["cache_dtype"]
    return VllmFacts(
        version=version,
        block_tokens=cache["block_size"],
        blocks=cache["num_gpu_blocks"],
        max_context_tokens=model["max_model_len"],
        dtype=dtype,
        kv_dtype=dtype if kv == "auto" else _dtype(kv),
        attention=f"{device}-{backend}",
        width=parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"],
        step_tokens=config["scheduler_config"]["max_num_batched_tokens"],
        batch_invariant=bool(info["vllm_env"]["VLLM_BATCH_INVARIANT"]),
    )


def _dtype(name: str) -> str:
    """Return Baton's name of a dtype such as ``torch.bfloat16`` or ``fp8_e4m3``."""
    plain = name.removeprefix("torch.").partition("_")[0]
    return _DTYPES[plain]
