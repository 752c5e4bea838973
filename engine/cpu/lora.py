"""LoRA adapters in memory, and what they add to the products of a step.

    x_TK @ A_RK.T -> h_TR      h_TR @ B_NR.T -> delta_TN, for the T rows of one adapter

The model computes q, k, v in one product and gate, up in another. Their ``A`` are stacked and their
``B`` stand on a block diagonal, so that one such product gets one delta:

    A  [ A_q ]        B  [ B_q  0    0   ]
       [ A_k ]           [ 0    B_k  0   ]      with each scale in B, and ranks padded with zeros
       [ A_v ]           [ 0    0    B_v ]      to a multiple of 16: few shapes, kernels like them

In ``exact`` both products keep to row counts that were found bit-equal, so that a row's delta does
not depend on who shares its batch or chunk.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TK give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.artifacts.artifact import ModelConfig
from engine.artifacts.lora_artifact import (
    AdapterArtifact,
    AdapterError,
    LowRank,
    read_adapter,
    target_shapes,
)
from engine.core.errors import AdapterLoadError
from engine.core.params import AdapterRef
from engine.cpu.linear import ANY_ROWS, Linear, RowCounts, probe_row_counts
from engine.cpu.parallel.shard import Shard
from engine.models.rope import pair_rows
from engine.numerics import Numerics

_RANK_STEP = 16
_PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_PAIRED = ("q_proj", "k_proj")  # their rows are stored with adjacent RoPE pairs


Product = Callable[[torch.Tensor], torch.Tensor]
"""``[T, K] -> [T, N]``."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter adds to one product of one layer."""

    a: Product
    b: Product

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """``[T, K] -> [T, N]``."""
        return self.b(self.a(x_TK))


Adapter = dict[tuple[int, str], Delta]
"""Deltas by (layer, product)."""


class StepDeltas:
    """The deltas of one step, each for the rows of its adapter.

    Args:
        groups: Row numbers in the flat batch, ascending, and their adapter.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[int], Adapter]]) -> None:
        self._groups = [(_rows(numbers), adapter) for numbers, adapter in groups]

    def apply(self, layer: int, name: str, x_TE: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Add to ``y_TN`` what the adapters make of ``x_TE``."""
        for rows, adapter in self._groups:
            delta = adapter.get((layer, name))
            if delta is None:
                continue
            if isinstance(rows, slice):
                y_TN[rows].add_(delta(x_TE[rows]))
            else:
                y_TN.index_add_(0, rows, delta(x_TE.index_select(0, rows)))


def _rows(numbers: Sequence[int]) -> slice | torch.Tensor:
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return slice(first, last + 1)
    return torch.tensor(numbers)


class LoadedAdapters:
    """The adapters of one model; an ``engine.core.plan.AdapterStore``.

    Args:
        config: Of the base model.
        dtype: Of its activations.
        numerics: ``exact`` finds the permitted row counts of each new shape.
        max_rank: The largest rank that is served.
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
        """See ``AdapterStore``."""
        if self._shard is not None:
            self._shard.adapt(ref)
        self._held[ref.digest] = prepared

    def remove(self, digest: str) -> None:
        """See ``AdapterStore``."""
        if self._shard is not None:
            self._shard.drop(digest)
        del self._held[digest]

    def prepare(self, ref: AdapterRef) -> Adapter:
        """Load an adapter, all ranks at once; one thread at a time.

        Raises:
            AdapterLoadError: It does not fit, holds NaN or Inf, or has changed since it was named.
        """
        if self._shard is None:
            return self._prepare(ref)
        return self._shard.prepare_adapter(ref, partial(self._prepare, ref))

    @torch.inference_mode()
    def _prepare(self, ref: AdapterRef) -> Adapter:
        try:
            artifact = read_adapter(Path(ref.path), self._config, self._max_rank)
        except AdapterError as error:
            raise AdapterLoadError(f"adapter {ref.name}: {error}") from error
        if artifact.digest.hex() != ref.digest:
            raise AdapterLoadError(
                f"adapter {ref.name}: {ref.path} has changed since it was loaded (digest "
                f"{artifact.digest.hex()}, not {ref.digest}); unload it and load it again"
            )
        weights = self._read(ref, artifact)
        by_place = {(part.layer, part.target): part for part in artifact.weights}
        adapter: Adapter = {}
        for layer in sorted({part.layer for part in artifact.weights}):
            for name, targets in _PRODUCTS.items():
                parts = [by_place.get((layer, target)) for target in targets]
                if any(part is not None for part in parts):
                    adapter[layer, name] = self._delta(targets, parts, weights)
        return adapter

    def _read(self, ref: AdapterRef, artifact: AdapterArtifact) -> dict[str, torch.Tensor]:
        try:
            with safe_open(artifact.weights_file, framework="pt") as file:
                weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise AdapterLoadError(f"adapter {ref.name}: cannot be read ({error})") from error
        broken = [
            name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())
        ]
        if broken:
            raise AdapterLoadError(f"adapter {ref.name}: NaN or Inf in {broken[0]}")
        return weights

    def _delta(
        self,
        targets: Sequence[str],
        parts: Sequence[LowRank | None],
        weights: dict[str, torch.Tensor],
    ) -> Delta:
        """Stack the ``A`` and put the ``B`` on a block diagonal; a missing part adds nothing."""
        shapes = target_shapes(self._config)
        outputs = [shapes[target][0] for target in targets]
        inputs = shapes[targets[0]][1]
        rank = sum(part.rank for part in parts if part is not None)
        a_RK = torch.zeros(-(-rank // _RANK_STEP) * _RANK_STEP, inputs)
        b_NR = torch.zeros(sum(outputs), a_RK.shape[0])
        row = column = 0
        for target, part, height in zip(targets, parts, outputs, strict=True):
            if part is not None:
                b = weights[part.b_name] * part.scale
                if target in _PAIRED:
                    b = pair_rows(b, self._config.head_dim)
                a_RK[column : column + part.rank] = weights[part.a_name]
                b_NR[row : row + height, column : column + part.rank] = b
                column += part.rank
            row += height
        return Delta(self._linear(a_RK), self._linear(self._own_rows(b_NR, targets, outputs)))

    def _own_rows(
        self, b_NR: torch.Tensor, targets: Sequence[str], outputs: Sequence[int]
    ) -> torch.Tensor:
        """What a rank computes of a product: the same rows as of the layer's own weight."""
        if self._shard is None:
            return b_NR
        parts = torch.split(b_NR, list(outputs))
        names = [target.removesuffix("_proj") for target in targets]
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
