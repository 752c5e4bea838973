"""Extension of vLLM's workers: generators of random numbers that vLLM can rewind on CPUs.

With chunked prefill vLLM samples a token after each step, and discards it unless the prompt is
complete. Then it rewinds the generator of a request with a seed. Generators of CPUs cannot be
rewound, and the error would end vLLM. Here they begin again with their seed, as nothing else was
sampled.
"""

import torch
from vllm.platforms import current_platform


class _Generator(torch.Generator):
    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.manual_seed(self.initial_seed())


class RewindingWorker:
    """Base class that vLLM adds to its workers; importing it is enough."""


if current_platform.is_cpu():
    torch.Generator = _Generator  # type: ignore[misc]
