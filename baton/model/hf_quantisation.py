"""``quantization_config`` of ``config.json``: formats of quantised matrices in safetensors.

Matrices are restored when they are read. Formats of activations have no effect: activations stay
in the engine's dtype, which is more precise. What tensors show by their shapes (which matrices are
quantised, groups, bits of compressed-tensors) is not read from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.model.hf_keys import refuse_values
from baton.model.model_config import ModelError

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_DEFAULT_BITS = {"fp8": 0, "awq": 4, "gptq": 0, "mxfp4": 0}
_ALLOWED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3",), "expert_dtype": ("fp8",)},
    "compressed-tensors": {"transform_config": ({},)},
    "mxfp4": {},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM")},
    "gptq": {
        "bits": (2, 4, 8),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "is_marlin_format": (False,),
        "dynamic": ({},),
        "rotation": ("",),
    },
}
"""Values of options by method; another value is refused."""
METHODS = tuple(_ALLOWED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Format of quantised matrices.

    Attributes:
        method: A key of ``_ALLOWED``.
        bits: Bits of a value, for ``awq`` and ``gptq``.
        group: Inputs with a common scale, for ``awq`` and ``gptq``; 0: all of them.
        block: Rows and columns with a common scale, if scales are by block.
        zero_offset: Number to add to stored zero points.
    """

    method: str
    bits: int = 0
    group: int = 0
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def read_quantisation(where: str, raw: Mapping[str, Any]) -> Quantisation | None:
    """Return the format of the quantised matrices, or ``None`` if there are none.

    Raises:
        ModelError: The format is not supported, or has an unsupported option.
    """
    options = raw.get("quantization_config")
    if not options:
        return None
    method = options.get("quant_method", "unknown")
    if method not in _ALLOWED:
        raise ModelError(
            f"{where}: quantisation {method!r} of safetensors is not supported "
            f"(supported: {', '.join(sorted(_ALLOWED))})"
        )
    refuse_values(where, {"bits": _DEFAULT_BITS.get(method), **options}, _ALLOWED[method])
    if method == "compressed-tensors":
        return _compressed(where, options)
    is_first = options.get("checkpoint_format") != "gptq_v2"  # which stores zero points minus one
    return Quantisation(
        method=method,
        bits=int(options.get("bits", _DEFAULT_BITS[method])),
        group=_group(where, options),
        block=_block(where, options.get("weight_block_size")),
        zero_offset=int(method == "gptq" and is_first),
    )


def _compressed(where: str, options: Mapping[str, Any]) -> Quantisation:
    refuse_values(where, options.get("sparsity_config") or {}, {"format": ("dense",)})
    blocks = set()
    groups = options.get("config_groups") or {}
    for group in groups.values():
        form = group.get("format") or options.get("format")
        if form not in _FORMATS:
            raise ModelError(f"{where}: format {form!r} of compressed-tensors is not supported")
        weights = group.get("weights") or {}
        bits = (4, 8) if form == "pack-quantized" else (8,)
        refuse_values(where, weights, {"num_bits": bits, "strategy": _STRATEGIES})
        blocks.add(_block(where, weights.get("block_structure")))
    if len(blocks) > 1:
        raise ModelError(f"{where}: several block structures of compressed-tensors")
    return Quantisation(method="compressed-tensors", block=next(iter(blocks), None))


def _group(where: str, options: Mapping[str, Any]) -> int:
    size = options.get("group_size", options.get("q_group_size", 128))
    if type(size) is not int or size == 0 or size < -1:
        raise ModelError(f"{where}: group_size = {size!r} must be -1 or a positive number")
    return max(size, 0)


def _block(where: str, sides: Any) -> tuple[int, int] | None:
    if sides is None:
        return None
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ModelError(f"{where}: block {sides} must be two positive numbers")
    return sides[0], sides[1]
