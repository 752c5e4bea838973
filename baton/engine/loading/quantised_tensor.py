"""Quantised matrices of safetensors, restored row by row when they are read.

A value is (level - zero point) * scale. N outputs, K inputs, G groups of inputs, P levels in 32
bits, lowest bits first:

    fp8, compressed-tensors   weight [N, K], weight_scale(_inv) of a tensor, row, group or block
    ... pack-quantized        weight_packed [N, K / P], weight_scale [N, G],
                              weight_zero_point [N / P, G], weight_g_idx [K]
    awq                       qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    gptq                      qweight [K / P, N], qzeros [G, N / P], scales [G, N], g_idx [K]

Beside the result a read needs the packed matrix and a piece of fp32.
"""

# ruff: noqa: N806 - suffixes such as scale_NG give shapes

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.loading.safetensors_file import StoredTensor
from baton.model.hf_quantisation import Quantisation

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of 8 columns in its word
_PIECE_VALUES = 1 << 19
_KINDS = ("weight_packed", "qweight", "weight")
_PARTS = (
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("qzeros", "scales", "g_idx"),
)
# scales of activations and KV, which are not quantised here
_UNUSED = ("input_scale", "activation_scale", "input_zero_point", "output_scale", "k_scale")
_ENDINGS = (*(f".{part}" for part in (*_UNUSED, "v_scale", "q_scale")), "_proj_scales")
_LEVELS = ("F8_E4M3", "I8", "I32")
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4_PAIRS = torch.cartesian_prod(torch.cat((_FP4, -_FP4)), torch.cat((_FP4, -_FP4))).flip(1)
_FP4_BIAS = 127


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Quantised matrix, with the interface of ``StoredTensor``.

    Attributes:
        levels: The matrix as it is stored.
        parts: Other tensors by the last part of their names.
        result: Dtype of the restored values.
    """

    levels: StoredTensor
    parts: Mapping[str, StoredTensor]
    form: Quantisation
    shape: tuple[int, ...]
    result: torch.dtype
    dtype: str = "F32"

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Restore rows ``a:b``; raise ``ValueError`` if the parts do not fit together."""
        try:
            return self._restored(*rows.indices(self.shape[0])[:2])
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"parts of the quantised matrix do not fit: {error}") from error

    def _restored(self, first: int, last: int) -> torch.Tensor:
        restored = torch.empty((last - first, self.shape[1]), dtype=self.result)
        by_inputs = "qzeros" in self.parts
        whole = self.levels[slice(None)] if by_inputs else None
        scale_NG = self._scales()
        zero_NG = self._zero_points()
        group_K = self._groups(scale_NG.shape[1])
        step = max(1, _PIECE_VALUES // self.shape[1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            values = self._levels(whole, begin, end).float()
            for each_NG, add in ((zero_NG, torch.sub), (scale_NG, torch.mul)):
                own = each_NG[begin:end] if len(each_NG) > 1 else each_NG
                spread = own if own.shape[1] == 1 else own[:, group_K]
                add(values, spread, out=values)
            restored[begin - first : end - first] = values
        return restored

    def _levels(self, whole: torch.Tensor | None, begin: int, end: int) -> torch.Tensor:
        """Return levels of rows as ``[rows, K]`` integers or fp8."""
        if whole is None:
            levels = self.levels[slice(begin, end)]
            if levels.dtype != torch.int32:
                return levels
            return _unpacked(levels, self._packed_bits())[:, : self.shape[1]]
        if self.form.method == "gptq":
            return _unpacked(whole[:, begin:end].T.contiguous(), self.form.bits)
        words = whole[:, begin // 8 : -(-end // 8)].contiguous()
        levels = _unpacked(words, 4, _AWQ_ORDER).T.contiguous()
        return levels[begin % 8 :][: end - begin]

    def _packed_bits(self) -> int:
        bits = _WORD_BITS * self.levels.shape[1] // self.shape[1]
        if bits not in (4, 8) or self.levels.shape[1] != -(-self.shape[1] * bits // _WORD_BITS):
            raise ValueError(f"{self.levels.shape[1]} words for {self.shape[1]} inputs")
        return bits

    def _scales(self) -> torch.Tensor:
        """Return the scales as ``[N or 1, G]``."""
        N, K = self.shape
        if "scales" in self.parts:
            return self._read("scales").float().T
        inverse = "weight_scale_inv"  # so called, but a factor
        scale = self._read(inverse if inverse in self.parts else "weight_scale").float()
        if scale.numel() == 1:
            return scale.view(1, 1)
        height, width = self.form.block or (N, K)
        if tuple(scale.shape) == (-(-N // height), -(-K // width)):
            return scale.repeat_interleave(height, 0)[:N]
        scale = scale.view(len(scale), -1)
        if len(scale) != N or K % scale.shape[1]:
            raise ValueError(f"scales {list(scale.shape)} do not fit")
        return scale

    def _zero_points(self) -> torch.Tensor:
        """Return the zero points as ``[N or 1, G or 1]``."""
        N = self.shape[0]
        if "qzeros" in self.parts:
            order = _AWQ_ORDER if self.form.method == "awq" else ()
            zeros = _unpacked(self._read("qzeros"), self.form.bits, order)
            return (zeros.float() + self.form.zero_offset).T[:N]
        is_packed = self.levels.dtype == "I32"
        middle = 1 << (self._packed_bits() - 1) if is_packed else 0
        if "weight_zero_point" not in self.parts:
            return torch.full((1, 1), float(middle))
        zeros = self._read("weight_zero_point")
        if zeros.dtype == torch.int32:
            return _unpacked(zeros.T, self._packed_bits()).float().T[:N]
        return zeros.float().view(len(zeros), -1) + middle

    def _groups(self, groups: int) -> torch.Tensor:
        """Return the group of each input."""
        for name in ("g_idx", "weight_g_idx"):
            if name in self.parts:
                group_K = self._read(name).long()
                if int(group_K.min()) >= 0:  # -1: no order
                    return group_K
        width = self.form.block[1] if self.form.block else self.form.group
        return torch.arange(self.shape[1]) // (width or -(-self.shape[1] // groups))

    def _read(self, part: str) -> torch.Tensor:
        return self.parts[part][slice(None)]


def _unpacked(words: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return the levels in words, ``[R, C] -> [R, C * 32 / bits]``, of 8 bits without sign."""
    places = torch.tensor(order or range(_WORD_BITS // bits), dtype=torch.int32)
    levels = (words[..., None] >> (places * bits)).to(torch.uint8)
    return levels.bitwise_and_((1 << bits) - 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Matrices ``[experts, K, N]`` in MXFP4, with the interface of ``StoredTensor``.

    ``blocks`` are pairs of values ``[experts, N, G, 16]``, ``scales`` exponents of groups.
    """

    blocks: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    result: torch.dtype
    dtype: str = "F32"

    def __getitem__(self, experts: slice) -> torch.Tensor:
        """Restore the matrices of experts ``a:b``."""
        values = _FP4_PAIRS.to(self.result)[self.blocks[experts].int()].flatten(3)
        exponents = self.scales[experts].to(torch.int32) - _FP4_BIAS
        return torch.ldexp(values, exponents[..., None]).flatten(2).transpose(1, 2)


Stored = StoredTensor | QuantisedTensor | Mxfp4Tensor


def join_quantised(
    tensors: Mapping[str, StoredTensor], form: Quantisation, result: torch.dtype
) -> dict[str, Stored]:
    """Return the tensors with each quantised matrix as one, ``X.weight``.

    Raises:
        ValueError: A part of a matrix is missing.
    """
    joined: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind in _KINDS and tensor.dtype in _LEVELS:
            parts = {part: found for part in _PARTS if (found := tensors.get(f"{stem}.{part}"))}
            if not parts.keys() & {"scales", "weight_scale", "weight_scale_inv"}:
                raise ValueError(f"{stem} has no scales")
            shape = _shape(tensor, kind, parts, form)
            joined[f"{stem}.weight"] = QuantisedTensor(tensor, parts, form, shape, result)
        elif form.method == "mxfp4" and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            experts, outputs, groups, half = tensor.shape
            shape = (experts, groups * half * 2, outputs)
            joined[stem] = Mxfp4Tensor(tensor, tensors[f"{stem}_scales"], shape, result)
        elif kind not in _PARTS and not name.endswith(_ENDINGS):
            joined[name] = tensor
    return joined


def _shape(
    levels: StoredTensor, kind: str, parts: Mapping[str, StoredTensor], form: Quantisation
) -> tuple[int, ...]:
    if kind == "weight":
        return levels.shape
    if kind == "weight_packed":
        return tuple(parts["weight_shape"][slice(None)].tolist())
    rows, columns = levels.shape
    if form.method == "gptq":
        return columns, rows * _WORD_BITS // form.bits
    return columns * 8, rows
