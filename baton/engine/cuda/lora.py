"""LoRA adapters on the device, and what they add to the products of a step.

``baton/engine/loading/lora_weights.py`` reads them; their products are those of the decoder, so in
``exact`` a row's delta does not depend on who shares its step.
"""

# ruff: noqa: N803 - suffixes such as x_TK give shapes

from collections.abc import Mapping, Sequence

import torch

from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.products import Products
from baton.engine.loading.lora_weights import read_lora_weights
from baton.engine.models.lora import Adapter, Delta
from baton.model.model_config import ModelConfig
from baton.types.params import AdapterRef


class StepDeltas:
    """The deltas of one step, each for the rows of its adapter.

    Args:
        rows: Row numbers in the flat batch by adapter.
        adapters: The adapters.
        device: Where the rows are.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[int]], adapters: "CudaAdapters", device: torch.device
    ) -> None:
        self._groups = [
            (torch.tensor(numbers, device=device), adapters[name]) for name, numbers in rows.items()
        ]

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add to ``y_TN`` what the adapters make of ``x_TE``."""
        for rows, adapter in self._groups:
            delta = adapter.get((layer, name))
            if delta is not None:
                # not index_add_, which adds by atomic operations of its own rounding
                sums = y_TN.index_select(0, rows).add_(delta(x_TE.index_select(0, rows)))
                y_TN.index_copy_(0, rows, sums)


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


class CudaAdapters:
    """The adapters of one model on the device; an ``baton.engine.core.model_runner.AdapterStore``.

    Args:
        config: Of the base model.
        decoder: The base model.
        max_rank: The largest rank that is served.
    """

    def __init__(self, config: ModelConfig, decoder: CudaDecoder, max_rank: int = 64) -> None:
        self._config = config
        self._decoder = decoder
        self._max_rank = max_rank
        self._held: dict[str, Adapter] = {}

    def __getitem__(self, digest: str) -> Adapter:
        return self._held[digest]

    @torch.inference_mode()
    def prepare(self, ref: AdapterRef) -> Adapter:
        """See ``AdapterStore``.

        Raises:
            AdapterLoadError: It does not fit, holds NaN or Inf, or has changed since it was named.
        """
        return {
            (joined.layer, joined.product): Delta(
                self._on_host(joined.a_RK), self._on_host(joined.b_NR)
            )
            for joined in read_lora_weights(ref, self._config, self._max_rank)
        }

    def add(self, ref: AdapterRef, prepared: Adapter) -> None:
        """See ``AdapterStore``. Not ``prepare``, a thread's, but the step loop uses the device."""
        for delta in prepared.values():
            for part in (delta.a, delta.b):
                if isinstance(part, DeviceProduct):
                    part.move(self._decoder.device)
        self._held[ref.digest] = prepared

    def remove(self, digest: str) -> None:
        """See ``AdapterStore``."""
        del self._held[digest]

    def _on_host(self, weight_NK: torch.Tensor) -> DeviceProduct:
        return DeviceProduct(weight_NK.to(self._decoder.dtype), self._decoder.product)
