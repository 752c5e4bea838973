"""All layers of a decoder in one native call, with the kernels of ``../decoder.py``'s pass.

The pass in Python makes some ten calls a layer, which cost more than the products of a single row.
Bits are the same. A pass with adapters, ranks or experts uses Python.
"""

# ruff: noqa: N803 - suffixes such as x_TE give shapes

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from baton.engine.cpu.linear import Linear
from baton.engine.cpu.native.attention import NativeAttention, NativeCalls
from baton.engine.cpu.native.library import PAIRS, sums
from baton.engine.cpu.native.products import NativeInt4Weight, NativeInt8Weight, NativeWeight
from baton.engine.models.layer import LayerVectors

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("kind", _LONG),
        *((name, _POINTER) for name in ("packed", "scales", "offsets")),
        *((name, _LONG) for name in ("digits", "outputs", "inputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("bias", "head_norm", "attn_post_norm", "mlp_norm")),
        *((name, _POINTER) for name in ("mlp_post_norm", "next_norm", "keys", "values")),
        *((name, _LONG) for name in ("window", "frequencies")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("hidden", "heads", "kv_heads", "dim", "inner")),
        *((name, _LONG) for name in ("gelu", "sums", "format", "token_bytes", "head_bytes")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("spans", _POINTER),
        ("tables", _POINTER),
        ("rotations", _POINTER * 2),
        *((name, _LONG) for name in ("num_spans", "rows", "threads")),
    )


class LayerParts(NamedTuple):
    """Parts of one layer for the native pass.

    Attributes:
        linears: ``qkv``, ``o``, ``gate_up``, ``down``.
        frequencies: Index of the layer's RoPE base.
    """

    linears: Sequence[Linear]
    vectors: LayerVectors
    frequencies: int


class NativeLayers:
    """All layers over one pool; `native_layers` makes them if every part is native."""

    def __init__(
        self, parts: Sequence[LayerParts], attention: NativeAttention, eps: float, *, is_gelu: bool
    ) -> None:
        self._run = attention.library.baton_layers
        self._kept = (parts, attention)  # keeps the memory alive
        first = parts[0].linears
        self._model = _Model(
            hidden=first[0].inputs,
            inner=first[3].inputs,
            gelu=is_gelu,
            sums=sums(),
            eps=eps,
            **attention.shape,
        )
        self._layers = (_Layer * len(parts))(
            *(
                _Layer(
                    *(_matrix(linear) for linear in part.linears),
                    bias=_at(part.vectors.qkv_bias),
                    head_norm=_at(part.vectors.head_norm),
                    attn_post_norm=_at(part.vectors.attn_post_norm),
                    mlp_norm=_at(part.vectors.mlp_norm),
                    mlp_post_norm=_at(part.vectors.mlp_post_norm),
                    next_norm=_at(after.vectors.attn_norm) if after is not None else None,
                    keys=keys,
                    values=values,
                    window=window,
                    frequencies=part.frequencies,
                )
                for part, after, (keys, values, window) in zip(
                    parts, [*parts[1:], None], attention.places(), strict=True
                )
            )
        )

    def run(
        self,
        calls: NativeCalls,
        x_TE: torch.Tensor,
        h_TE: torch.Tensor,
        rotations: Sequence[torch.Tensor],
        on_layers_done: Callable[[int], None] | None,
    ) -> None:
        """Add all layers to ``x_TE`` (fp32, in place).

        Args:
            calls: Plan of the step; K and V are stored first.
            x_TE: Sum over the layers; contiguous.
            h_TE: Norm of the sum for the first layer, bf16, contiguous; changed.
            rotations: RoPE factors for each base.
            on_layers_done: Called with 1, 2, ... as soon as that many layers' KV is stored.
        """
        spans, count, tables = calls.pointers()
        at = [rotation.data_ptr() for rotation in rotations]
        step = _Step(
            spans=spans,
            tables=tables,
            rotations=(_POINTER * 2)(at[0], at[-1]),
            num_spans=count,
            rows=x_TE.shape[0],
            threads=calls.threads,
        )
        model = ctypes.byref(self._model)
        where = ctypes.byref(step)
        x = x_TE.data_ptr()
        h = h_TE.data_ptr()
        layers = self._layers
        if on_layers_done is None:
            self._run(model, layers, len(layers), where, x, h)
            return
        for index in range(len(layers)):
            self._run(model, ctypes.byref(layers[index]), 1, where, x, h)
            on_layers_done(index + 1)


def _matrix(linear: Linear) -> _Matrix:
    packed = linear.native
    if isinstance(packed, NativeInt8Weight):
        return _Matrix(
            kind=2,
            packed=packed.place,
            scales=packed.scales.data_ptr(),
            offsets=packed.offsets.data_ptr(),
            digits=packed.digits,
            outputs=linear.outputs,
            inputs=linear.inputs,
        )
    if isinstance(packed, NativeInt4Weight):
        kind = 3
    elif isinstance(packed, NativeWeight):
        kind = 0 if sums() == PAIRS else 1
    else:
        raise TypeError(f"{type(packed).__name__} is not a native weight")
    return _Matrix(kind=kind, packed=packed.place, outputs=linear.outputs, inputs=linear.inputs)


def _at(vector: torch.Tensor | None) -> Any:
    return None if vector is None else vector.data_ptr()


def native_layers(
    parts: Sequence[LayerParts], attention: object, eps: float, *, is_gelu: bool
) -> NativeLayers | None:
    """Return the layers as one native call, or ``None`` if a part is not native."""
    if not isinstance(attention, NativeAttention):
        return None
    linears = [linear for part in parts for linear in part.linears]
    if any(linear.native is None for linear in linears):
        return None
    return NativeLayers(parts, attention, eps, is_gelu=is_gelu)
