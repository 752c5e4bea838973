"""Extension of vLLM's workers: two faults of vLLM on CPUs are mended here.

With chunked prefill vLLM samples a token after each step, and discards it unless the prompt is
complete. Then it rewinds the generator of a request with a seed. Generators of CPUs cannot be
rewound, and the error would end vLLM. Here they begin again with their seed, as nothing else was
sampled.

A token without a LoRA adapter has the index -1. vLLM's operations for CPUs take the last adapter
for it (vllm#48421), so that a request without an adapter got the text of one when both were in one
batch. Here such a token adds zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform


class _Generator(torch.Generator):
    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self.manual_seed(self.initial_seed())


class RewindingWorker:
    """Base class that vLLM adds to its workers; importing it is enough."""


def _zero_without_adapter(expand: Callable[..., None]) -> Callable[..., None]:
    """Return ``expand`` with inputs of zero for tokens whose index of an adapter is negative."""

    def expand_adapted(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *arguments: Any,
        **named: Any,
    ) -> None:
        adapted = inputs.masked_fill((indices < 0).unsqueeze(1), 0.0)
        expand(adapted, weights, output, indices, *arguments, **named)

    return expand_adapted


def _mend_adapters() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        mended = _zero_without_adapter(getattr(lora_ops, name))
        setattr(lora_ops, name, mended)  # for prefill, which calls them there
        setattr(punica_cpu, name, mended)


if current_platform.is_cpu():
    torch.Generator = _Generator  # type: ignore[misc]
    _mend_adapters()
