"""LoRA adapters on the device, and what they add to the products of a step.

Adapters are read, checked and stacked as on the CPU (``engine/cpu/lora.py``); their products are
those of the decoder, so in ``exact`` a row's delta does not depend on who shares its step.
"""

# ruff: noqa: N803 - suffixes such as x_TK give shapes

from collections.abc import Sequence

import torch

from engine.artifacts.artifact import ModelConfig
from engine.core.params import AdapterRef
from engine.cpu.lora import Adapter, LoadedAdapters, Product
from engine.cuda.decoder import CudaDecoder
from engine.cuda.kernels.products import Products


class DeviceProduct:
    """``x @ weight.T``; on the device once it was moved there."""

    def __init__(self, weight_NK: torch.Tensor, product: Products) -> None:
        self._weight_NK = weight_NK
        self._product = product

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``[T, K] -> [T, N]``."""
        return self._product(x_TK, self._weight_NK)

    def move(self, device: torch.device) -> None:
        """Put the weight there."""
        self._weight_NK = self._weight_NK.to(device)


class CudaAdapters(LoadedAdapters):
    """The adapters of one model on the device; an ``engine.core.plan.AdapterStore``.

    Args:
        config: Of the base model.
        decoder: The base model.
        max_rank: The largest rank that is served.
    """

    def __init__(self, config: ModelConfig, decoder: CudaDecoder, max_rank: int = 64) -> None:
        super().__init__(config, decoder.dtype, max_rank=max_rank)
        self._decoder = decoder

    def add(self, ref: AdapterRef, prepared: Adapter) -> None:
        """See ``AdapterStore``. Not ``prepare``, a thread's, but the step loop uses the device."""
        for delta in prepared.values():
            for part in (delta.a, delta.b):
                if isinstance(part, DeviceProduct):
                    part.move(self._decoder.device)
        super().add(ref, prepared)

    def _linear(self, weight_NK: torch.Tensor) -> Product:
        return DeviceProduct(weight_NK.to(self._decoder.dtype), self._decoder.product)


class DeviceDeltas:
    """The deltas of one step, each for the rows of its adapter.

    Args:
        groups: Row numbers in the flat batch and their adapter.
        device: Where the rows are.
    """

    def __init__(
        self, groups: Sequence[tuple[Sequence[int], Adapter]], device: torch.device
    ) -> None:
        self._groups = [(torch.tensor(rows, device=device), adapter) for rows, adapter in groups]

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add to ``y_TN`` what the adapters make of ``x_TE``."""
        for rows, adapter in self._groups:
            delta = adapter.get((layer, name))
            if delta is not None:
                # not index_add_, which adds by atomic operations of its own rounding
                sums = y_TN.index_select(0, rows).add_(delta(x_TE.index_select(0, rows)))
                y_TN.index_copy_(0, rows, sums)
