"""LoRA adapters in memory, and their additions to the products of a step.

``baton/engine/loading/lora_weights.py`` reads them. Each product of an adapter is a linear layer
like the model's. In ``exact`` both products keep to row counts that were found bit-equal, so a
row's delta does not depend on the rest of its batch or chunk.
"""

# ruff: noqa: N803 - suffixes such as x_TE give shapes

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from baton.engine.cpu.linear import ANY_ROWS, Linear, RowCounts, probe_row_counts
from baton.engine.cpu.parallel.shard import Shard
from baton.engine.loading.lora_weights import JoinedWeights, read_lora_weights
from baton.engine.models.lora import PRODUCTS, Adapter, LoraDelta, Product
from baton.engine.numerics import Numerics
from baton.model.model_config import ModelConfig
from baton.types.params import AdapterRef


class CpuStepDeltas:
    """Deltas of one step, each for the rows of its adapter."""

    def __init__(self, rows: Mapping[str, Sequence[int]], adapters: "CpuAdapters") -> None:
        self._groups = [(_selected(numbers), adapters[name]) for name, numbers in rows.items()]

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add the adapters' products of ``x_TE`` to ``y_TN``."""
        for rows, adapter in self._groups:
            delta = adapter.get((layer, name))
            if delta is None:
                continue
            if isinstance(rows, slice):
                y_TN[rows].add_(delta(x_TE[rows]))
            else:
                y_TN.index_add_(0, rows, delta(x_TE.index_select(0, rows)))


def _selected(numbers: Sequence[int]) -> slice | torch.Tensor:
    first = numbers[0]
    last = numbers[-1]
    if last - first == len(numbers) - 1:
        return slice(first, last + 1)
    return torch.tensor(numbers)


class CpuAdapters:
    """Adapters of one model; an ``baton.engine.core.model_runner.AdapterStore``.

    Args:
        numerics: ``exact`` probes the permitted row counts of each new shape.
        shard: This rank's part of a tensor-parallel model: its rows of every ``B``.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        numerics: Numerics = "exact",
        max_rank: int = 64,
        shard: Shard | None = None,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._numerics = numerics
        self._max_rank = max_rank
        self._shard = shard
        self._row_counts: dict[tuple[int, int], RowCounts] = {}
        self._held: dict[str, Adapter] = {}

    def __getitem__(self, digest: str) -> Adapter:
        return self._held[digest]

    def add(self, ref: AdapterRef, prepared: Adapter) -> None:
        """Add a prepared adapter, on all ranks."""
        if self._shard is not None:
            self._shard.adapt(ref)
        self._held[ref.digest] = prepared

    def remove(self, digest: str) -> None:
        """Remove an adapter, on all ranks."""
        if self._shard is not None:
            self._shard.drop(digest)
        del self._held[digest]

    def prepare(self, ref: AdapterRef) -> Adapter:
        """Load an adapter on all ranks at once; call from one thread at a time.

        Raises:
            AdapterLoadError: It does not fit, holds NaN or Inf, or has changed on disk.
        """
        if self._shard is None:
            return self._prepare(ref)
        return self._shard.prepare_adapter(ref, partial(self._prepare, ref))

    @torch.inference_mode()
    def _prepare(self, ref: AdapterRef) -> Adapter:
        return {
            (joined.layer, joined.product): LoraDelta(
                self._linear(joined.a_RK), self._linear(self._own_rows(joined))
            )
            for joined in read_lora_weights(ref, self._config, self._max_rank)
        }

    def _own_rows(self, joined: JoinedWeights) -> torch.Tensor:
        """Return the rows that this rank computes: the same as of the layer's own weight."""
        if self._shard is None:
            return joined.b_NR
        parts = torch.split(joined.b_NR, list(joined.outputs))
        names = [target.removesuffix("_proj") for target in PRODUCTS[joined.product]]
        own = [part[self._shard.rows(name)] for part, name in zip(parts, names, strict=True)]
        return torch.cat(own)

    def _linear(self, weight_NK: torch.Tensor) -> Product:
        weight = weight_NK.to(self._dtype)
        if self._numerics == "fast":
            return Linear(weight, ANY_ROWS)
        shape = (weight.shape[0], weight.shape[1])
        known = self._row_counts.get(shape)
        if known is None:
            known = self._row_counts[shape] = probe_row_counts(*shape, self._dtype)
            Linear(weight, known).check()
        return Linear(weight, known)
