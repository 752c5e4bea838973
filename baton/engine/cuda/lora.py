"""LoRA adapters on the device, and their additions to the products of a step.

``baton/engine/loading/lora_weights.py`` reads them. Their products are those of the decoder, so in
``exact`` a row's delta does not depend on the other rows of its step.
"""

# ruff: noqa: N803 - suffixes such as x_TK give shapes

from collections.abc import Mapping, Sequence

import torch

from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.products import Products
from baton.engine.cuda.upload import upload
from baton.engine.loading.lora_weights import read_lora_weights
from baton.engine.models.lora import Adapter, LoraDelta
from baton.model.model_config import ModelConfig
from baton.types.params import AdapterRef


class StepDeltas:
    """Deltas of one step, each for the rows of its adapter.

    Args:
        rows: Row numbers in the flat batch by adapter.
    """

    def __init__(
        self, rows: Mapping[str, Sequence[int]], adapters: "CudaAdapters", device: torch.device
    ) -> None:
        places = upload(device, {name: torch.tensor(numbers) for name, numbers in rows.items()})
        self._groups = [(places[name], adapters[name]) for name in rows]

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add the adapters' products of ``x_TE`` to ``y_TN``."""
        for rows, adapter in self._groups:
            delta = adapter.get((layer, name))
            if delta is not None:
                # not index_add_, whose atomic additions round in another order
                sums = y_TN.index_select(0, rows).add_(delta(x_TE.index_select(0, rows)))
                y_TN.index_copy_(0, rows, sums)


class DeviceProduct:
    """Product ``x @ weight.T`` whose weight can be moved to the device."""

    def __init__(self, weight_NK: torch.Tensor, product: Products) -> None:
        self._weight_NK = weight_NK
        self._product = product

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Compute ``[T, K] -> [T, N]``."""
        return self._product(x_TK, self._weight_NK)

    def move(self, device: torch.device) -> None:
        """Move the weight to a device."""
        self._weight_NK = self._weight_NK.to(device)


class CudaAdapters:
    """Adapters of one model on the device; an ``baton.engine.core.model_runner.AdapterStore``.

    Args:
        max_rank: Largest LoRA rank that is served.
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
        """Load an adapter into host memory.

        Raises:
            AdapterLoadError: It does not fit, holds NaN or Inf, or has changed on disk.
        """
        return {
            (joined.layer, joined.product): LoraDelta(
                self._on_host(joined.a_RK), self._on_host(joined.b_NR)
            )
            for joined in read_lora_weights(ref, self._config, self._max_rank)
        }

    def add(self, ref: AdapterRef, prepared: Adapter) -> None:
        """Move a prepared adapter to the device, which only the step loop's thread uses."""
        for delta in prepared.values():
            for part in (delta.a, delta.b):
                if isinstance(part, DeviceProduct):
                    part.move(self._decoder.device)
        self._held[ref.digest] = prepared

    def remove(self, digest: str) -> None:
        """Remove an adapter from the device."""
        del self._held[digest]

    def _on_host(self, weight_NK: torch.Tensor) -> DeviceProduct:
        return DeviceProduct(weight_NK.to(self._decoder.dtype), self._decoder.product)
