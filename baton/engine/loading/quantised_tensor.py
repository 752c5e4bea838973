"""Quantised matrices of safetensors, restored row by row when they are read.

``stored_weights.py`` lists the formats. Beside the result a read needs the packed matrix and a
piece of fp32.
"""

# ruff: noqa: N806 - suffixes such as scale_NG give shapes

from collections.abc import Sequence

import torch

from baton.engine.loading.safetensors_data import read_rows
from baton.engine.loading.stored_weights import (
    WORD_BITS,
    Mxfp4Tensor,
    QuantisedTensor,
    Stored,
)
from baton.model.safetensors_file import StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of 8 columns in its word
_PIECE_VALUES = 1 << 19
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_PAIRS = torch.cartesian_prod(torch.cat((_FP4, -_FP4)), torch.cat((_FP4, -_FP4))).flip(1)
_FP4_BIAS = 127


def read_stored(stored: Stored, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Read rows ``a:b``; quantised ones are restored in ``dtype``.

    Raises:
        ValueError: The file ends too early, or an index in it is wrong.
    """
    if isinstance(stored, StoredTensor):
        return read_rows(stored, rows)
    if isinstance(stored, Mxfp4Tensor):
        return _restored_experts(stored, rows, dtype)
    try:
        return _restored(stored, *rows.indices(stored.shape[0])[:2], dtype)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"parts of the quantised matrix do not fit: {error}") from error


def _restored(t: QuantisedTensor, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    restored = torch.empty((last - first, t.shape[1]), dtype=dtype)
    whole = read_rows(t.levels) if "qzeros" in t.parts else None
    scale_NG = _scales(t)
    zero_NG = _zero_points(t)
    group_K = _groups(t, scale_NG.shape[1])
    step = max(1, _PIECE_VALUES // t.shape[1])
    for begin in range(first, last, step):
        end = min(begin + step, last)
        values = _levels(t, whole, begin, end).float()
        for each_NG, add in ((zero_NG, torch.sub), (scale_NG, torch.mul)):
            own = each_NG[begin:end] if len(each_NG) > 1 else each_NG
            spread = own if own.shape[1] == 1 else own[:, group_K]
            add(values, spread, out=values)
        restored[begin - first : end - first] = values
    return restored


def _levels(t: QuantisedTensor, whole: torch.Tensor | None, begin: int, end: int) -> torch.Tensor:
    """Return levels of rows as ``[rows, K]`` integers or fp8."""
    if whole is None:
        levels = read_rows(t.levels, slice(begin, end))
        return _unpacked(levels, t.bits)[:, : t.shape[1]] if t.bits else levels
    if t.form.method == "gptq":
        return _unpacked(whole[:, begin:end].T.contiguous(), t.bits)
    words = whole[:, begin // 8 : -(-end // 8)].contiguous()
    levels = _unpacked(words, t.bits, _AWQ_ORDER).T.contiguous()
    return levels[begin % 8 :][: end - begin]


def _scales(t: QuantisedTensor) -> torch.Tensor:
    """Return the scales as ``[N or 1, G]``."""
    N, K = t.shape
    scale = read_rows(t.scale).float()
    if "scales" in t.parts:
        return scale.T
    if scale.numel() == 1:
        return scale.view(1, 1)
    height, width = t.form.block or (N, K)
    if tuple(scale.shape) == (-(-N // height), -(-K // width)):
        return scale.repeat_interleave(height, 0)[:N]
    return scale.view(N, -1)


def _zero_points(t: QuantisedTensor) -> torch.Tensor:
    """Return the zero points as ``[N or 1, G or 1]``."""
    N = t.shape[0]
    if "qzeros" in t.parts:
        order = _AWQ_ORDER if t.form.method == "awq" else ()
        zeros = _unpacked(read_rows(t.parts["qzeros"]), t.bits, order)
        return (zeros.float() + t.form.zero_offset).T[:N]
    middle = 1 << (t.bits - 1) if t.bits else 0
    if "weight_zero_point" not in t.parts:
        return torch.full((1, 1), float(middle))
    zeros = read_rows(t.parts["weight_zero_point"])
    if zeros.dtype == torch.int32:
        return _unpacked(zeros.T, t.bits).float().T[:N]
    return zeros.float().view(len(zeros), -1) + middle


def _groups(t: QuantisedTensor, groups: int) -> torch.Tensor:
    """Return the group of each input."""
    for name in ("g_idx", "weight_g_idx"):
        if name in t.parts:
            group_K = read_rows(t.parts[name]).long()
            if int(group_K.min()) >= 0:  # -1: no order
                return group_K
    width = t.form.block[1] if t.form.block else t.form.group
    return torch.arange(t.shape[1]) // (width or -(-t.shape[1] // groups))


def _unpacked(words: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return the levels in words, ``[R, C] -> [R, C * 32 / bits]``, of 8 bits without sign."""
    places = torch.tensor(order or range(WORD_BITS // bits), dtype=torch.int32)
    levels = (words[..., None] >> (places * bits)).to(torch.uint8)
    return levels.bitwise_and_((1 << bits) - 1).flatten(1)


def _restored_experts(t: Mxfp4Tensor, experts: slice, dtype: torch.dtype) -> torch.Tensor:
    values = _FP4_PAIRS.to(dtype)[read_rows(t.blocks, experts).int()].flatten(3)
    exponents = read_rows(t.scales, experts).to(torch.int32) - _FP4_BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(2).transpose(1, 2)
