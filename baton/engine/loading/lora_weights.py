"""Weights of a LoRA adapter, checked and joined like the decoders' products.

    x_TK @ A_RK.T -> h_TR      h_TR @ B_NR.T -> delta_TN, for the T rows of one adapter

The model computes q, k, v in one product and gate, up in another. Their ``A`` are stacked and their
``B`` stand on a block diagonal, so that one such product gets one delta:

    A  [ A_q ]        B  [ B_q  0    0   ]
       [ A_k ]           [ 0    B_k  0   ]      with each scale in B, and ranks padded with zeros
       [ A_v ]           [ 0    0    B_v ]      to a multiple of 16: few shapes, kernels like them
"""

# ruff: noqa: N806, N815 - suffixes such as a_RK give shapes

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.engine.loading.safetensors_data import read_rows
from baton.engine.models.lora import PRODUCTS
from baton.engine.models.rope import pair_rows
from baton.model.lora_artifact import (
    WEIGHTS_FILE,
    AdapterArtifact,
    LowRank,
    read_same,
    target_shapes,
)
from baton.model.model_config import ModelConfig
from baton.model.safetensors_file import SafetensorsFile
from baton.types.errors import AdapterLoadError
from baton.types.params import AdapterRef

_RANK_STEP = 16
_PAIRED = ("q_proj", "k_proj")  # their rows are stored with adjacent RoPE pairs


@dataclass(frozen=True, slots=True)
class JoinedWeights:
    """Adapter weights for one product of one layer, in fp32.

    Attributes:
        product: One of ``baton.engine.models.lora.PRODUCTS``.
        a_RK: Stacked ``A`` matrices.
        b_NR: ``B`` matrices on a block diagonal.
        outputs: Number of rows of each target in ``b_NR``.
    """

    layer: int
    product: str
    a_RK: torch.Tensor
    b_NR: torch.Tensor
    outputs: Sequence[int]


def read_lora_weights(
    ref: AdapterRef, config: ModelConfig, max_rank: int
) -> Iterator[JoinedWeights]:
    """Yield the adapter's weights, product by product.

    Raises:
        AdapterLoadError: The adapter does not fit, contains NaN or Inf, or has another digest.
    """
    artifact = read_same(ref, config, max_rank)
    weights = _read_file(ref, artifact)
    parts_by_target = {(part.layer, part.target): part for part in artifact.weights}
    for layer in sorted({part.layer for part in artifact.weights}):
        for product, targets in PRODUCTS.items():
            parts = [parts_by_target.get((layer, target)) for target in targets]
            if any(part is not None for part in parts):
                yield _joined(layer, product, parts, weights, config)


def _read_file(ref: AdapterRef, artifact: AdapterArtifact) -> dict[str, torch.Tensor]:
    try:
        with SafetensorsFile(artifact.path / WEIGHTS_FILE) as file:
            weights = {name: read_rows(tensor).float() for name, tensor in file.tensors.items()}
    except (ValueError, OSError) as error:
        raise AdapterLoadError(f"adapter {ref.name}: cannot be read ({error})") from error
    broken = [name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())]
    if broken:
        raise AdapterLoadError(f"adapter {ref.name}: NaN or Inf in {broken[0]}")
    return weights


def _joined(
    layer: int,
    product: str,
    parts: Sequence[LowRank | None],
    weights: dict[str, torch.Tensor],
    config: ModelConfig,
) -> JoinedWeights:
    """Stack the ``A`` and put the ``B`` on a block diagonal; a missing part adds nothing."""
    targets = PRODUCTS[product]
    shapes = target_shapes(config)
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
                b = pair_rows(b, config.head_dim)
            a_RK[column : column + part.rank] = weights[part.a_name]
            b_NR[row : row + height, column : column + part.rank] = b
            column += part.rank
        row += height
    return JoinedWeights(layer, product, a_RK, b_NR, outputs)
