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

# ruff: noqa: N803, N806 - suffixes such as scale_NG give shapes

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
_ENDINGS = tuple(f".{part}" for part in (*_UNUSED, "v_scale", "q_scale", "k_zero_point"))
_LEVELS = ("F8_E4M3", "I8", "I32")


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Quantised matrix, with the interface of ``StoredTensor``.

    Attributes:
        levels: The matrix as it is stored.
        parts: Other tensors by the last part of their names.
        result: Dtype of the restored values.
    """

    name: str
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
        by_inputs = self.levels.name.endswith(".qweight")
        whole = self.levels[slice(None)] if by_inputs else None
        scale_NG = self._scales()
        zero_NG = self._zero_points()
        group_K = self._groups(scale_NG.shape[1])
        step = max(8, _PIECE_VALUES // self.shape[1] // 8 * 8)
        begin = first
        while begin < last:
            end = min(begin // step * step + step, last)
            values = self._levels(whole, begin, end).float()
            if zero_NG is not None:
                values -= _spread(zero_NG, begin, end, group_K)
            values *= _spread(scale_NG, begin, end, group_K)
            restored[begin - first : end - first] = values
            begin = end
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
        scale = self._read(
            "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"
        )
        scale = scale.float()
        if scale.numel() == 1:
            return scale.view(1, 1)
        if self.form.block is not None:
            height, width = self.form.block
            if tuple(scale.shape) == (-(-N // height), -(-K // width)):
                return scale.repeat_interleave(height, 0)[:N]
        scale = scale.view(len(scale), -1)
        if len(scale) != N or K % scale.shape[1]:
            raise ValueError(f"scales {list(scale.shape)} do not fit")
        return scale

    def _zero_points(self) -> torch.Tensor | None:
        """Return the zero points as ``[N or 1, G]``, if levels have any."""
        N = self.shape[0]
        if "qzeros" in self.parts:
            words = self._read("qzeros")
            zeros = (
                _unpacked(words, 4, _AWQ_ORDER)
                if self.form.method == "awq"
                else _unpacked(words, self.form.bits).float() + self.form.zero_offset
            )
            return zeros.float().T[:N]
        is_packed = self.levels.dtype == "I32"
        middle = 1 << (self._packed_bits() - 1) if is_packed else 0
        if "weight_zero_point" not in self.parts:
            return torch.full((1, 1), float(middle)) if is_packed else None
        zeros = self._read("weight_zero_point")
        if is_packed and zeros.dtype == torch.int32:
            return _unpacked(zeros.T, self._packed_bits()).float().T[:N]
        zeros = zeros.float().view(-1, 1) if zeros.ndim < 2 else zeros.float()
        return zeros + middle

    def _groups(self, groups: int) -> torch.Tensor | None:
        """Return the group of each input, or ``None`` if there is one group."""
        if groups == 1:
            return None
        for name in ("g_idx", "weight_g_idx"):
            if name in self.parts:
                group_K = self._read(name).long()
                if int(group_K.min()) >= 0:  # -1: no order
                    return group_K
        width = self.form.block[1] if self.form.block else self.form.group
        return torch.arange(self.shape[1]) // (width or -(-self.shape[1] // groups))

    def _read(self, part: str) -> torch.Tensor:
        return self.parts[part][slice(None)]


def _spread(
    values_NG: torch.Tensor, begin: int, end: int, group_K: torch.Tensor | None
) -> torch.Tensor:
    """Return the value of each element of rows, or what broadcasts to it."""
    own = values_NG if len(values_NG) == 1 else values_NG[begin:end]
    return own if group_K is None or own.shape[1] == 1 else own[:, group_K]


def _unpacked(words: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Return the levels in words, ``[R, C] -> [R, C * 32 / bits]``, of 8 bits without sign."""
    places = torch.tensor(order or range(_WORD_BITS // bits), dtype=torch.int32)
    levels = (words[..., None] >> (places * bits)).to(torch.uint8)
    return levels.bitwise_and_((1 << bits) - 1).flatten(1)


def join_quantised(
    tensors: Mapping[str, StoredTensor], form: Quantisation, result: torch.dtype
) -> dict[str, StoredTensor | QuantisedTensor]:
    """Return the tensors with each quantised matrix as one, ``X.weight``.

    Raises:
        ValueError: A part of a matrix is missing.
    """
    joined: dict[str, StoredTensor | QuantisedTensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind in _KINDS and tensor.dtype in _LEVELS:
            parts = {
                part: tensors[f"{stem}.{part}"] for part in _PARTS if f"{stem}.{part}" in tensors
            }
            if not parts.keys() & {"scales", "weight_scale", "weight_scale_inv"}:
                raise ValueError(f"{stem} has no scales")
            shape = _shape(tensor, kind, parts, form)
            joined[f"{stem}.weight"] = QuantisedTensor(
                f"{stem}.weight", tensor, parts, form, shape, result
            )
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
