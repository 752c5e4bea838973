"""Least time of a decode step: it reads all weights, and the KV of each sequence."""

import time
from collections.abc import Mapping

import torch

from baton.engine.loading.memory import kv_geometry
from baton.model.artifact import ModelConfig
from baton.types.geometry import BLOCK_TOKENS

READ_BYTES = 1 << 28  # more than the caches hold


class ReadBound:
    """Time of reading as many bytes as a decode step, in order, with torch's threads."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: ModelConfig, dtype: str
    ) -> None:
        self._weight_bytes = sum(weight.nbytes for weight in weights.values())
        if "head" in weights:  # of the embeddings, few rows are read
            self._weight_bytes -= weights["embed"].nbytes
        self._token_bytes = kv_geometry(config, dtype, 1).pool_bytes // BLOCK_TOKENS
        self._windows = config.layer_windows or (None,)
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)

    def probe_s(self) -> float:
        """Read memory once, and return the seconds that it took."""
        began_s = time.perf_counter()
        self._memory.sum()
        return time.perf_counter() - began_s

    def step_s(self, probe_s: float, batch: int, context: int) -> float:
        """Return the least seconds of a step of ``batch`` sequences, by a probe's seconds."""
        tokens = sum(min(window or context, context) for window in self._windows)
        kv_bytes = batch * tokens * self._token_bytes / len(self._windows)
        return probe_s * (self._weight_bytes + kv_bytes) / READ_BYTES
