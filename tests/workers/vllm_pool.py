"""The pages of a program in vLLM's place."""

import os
from pathlib import Path

import msgspec
import numpy as np

from tests.workers.vllm_program import RECORDED


class Pool:
    """The worker's pool as vLLM maps it: two layers, K and V, pages of one head in bf16."""

    def __init__(self, extra: dict[str, str]) -> None:
        cache = msgspec.json.decode((RECORDED / "server_info.json").read_bytes())
        cache = cache["vllm_config"]["cache_config"]
        shape = (2, 2, cache["num_gpu_blocks"] * cache["block_size"] // 16, 16 * 32 * 2)
        descriptor = os.open(extra["pool"], os.O_RDWR)
        os.ftruncate(descriptor, int(np.prod(shape)))
        self.bytes = np.memmap(extra["pool"], np.uint8, "r+", shape=shape)
        os.close(descriptor)
        Path(extra["generations"]).write_bytes(bytes(8 * shape[2]))
        Path(extra["order"]).write_text("amx")

    def save(self, pages: list[int], tokens: list[int]) -> None:
        self.bytes[:, :, pages] = self._expected(len(pages), tokens)

    def holds(self, pages: list[int], tokens: list[int]) -> bool:
        return np.array_equal(self.bytes[:, :, pages], self._expected(len(pages), tokens))

    def _expected(self, pages: int, tokens: list[int]) -> np.ndarray:
        """Return bytes that depend on the prompt's first tokens, and on their place."""
        shape = (2, 2, pages, self.bytes.shape[3])
        return np.random.default_rng(tokens[:32]).integers(0, 256, shape, np.uint8)
