"""KV tier of vLLM's OffloadingConnector on CPUs, whose own one serves GPUs only.

vLLM imports this in its environment. The connector, its manager and its events are vLLM's; only the
copies are these.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTier(CPUOffloadingSpec):
    """Blocks of a CPU's pool in other memory of the host."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker that copies."""
        if self._worker is None:
            self._worker = _Copies(kv_caches, self.num_chunks)
        return self._worker


class _Copies(OffloadingWorker):
    def __init__(self, kv_caches: Any, chunks: int) -> None:
        pools = [one.tensor for one in kv_caches.tensors]
        self._pools = [pool.view(len(pool), -1).view(torch.int8) for pool in pools]
        self._memory = [
            torch.empty((chunks, pool.shape[1]), dtype=torch.int8) for pool in self._pools
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pool, memory in zip(self._pools, self._memory, strict=True):
            memory[dst_spec.block_ids] = pool[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pool, memory in zip(self._pools, self._memory, strict=True):
            pool[dst_spec.block_ids] = memory[src_spec.block_ids]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a copy has ended when it is submitted."""
