"""Numerics modes `exact` and `fast`, and test data that makes rounding visible.

A kernel library that picks its code by shape gives no proof of equal bits, so they are measured on
each machine. Ordinary random data hides most differences (a bf16 result keeps 8 of the 24 bits that
were summed). The probes here sum pairs that cancel: the remainder is rounding noise, and another
order of summation changes nearly every element.
"""

import hashlib
from collections.abc import Iterable
from typing import Literal

import torch

from baton.types.errors import InternalError, NumericsError

Numerics = Literal["exact", "fast"]

_CHUNK_ROWS = 8192

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class NumericsSetupError(InternalError):
    """Kernels of this machine do not keep ``numerics: exact``."""

    code = "numerics_setup"


def numerics_of(setting: str) -> Numerics:
    """Return the numerics mode of a setting."""
    return "fast" if setting == "fast" else "exact"


def not_finite_error(rows: Iterable[int], plan_rows: int) -> NumericsError:
    """Return the error of a step with NaN or Inf in some of its plan's rows."""
    at_fault = tuple(sorted(rows))
    return NumericsError(
        f"NaN or Inf in the logits of {len(at_fault)} of {plan_rows} rows", rows=at_fault
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same storage as integers, so that NaN equals NaN and -0 differs from 0."""
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have equal bits."""
    return torch.equal(bits(left.contiguous()), bits(right.contiguous()))


def cancelling(
    rows: int, width: int, dtype: torch.dtype, *, sign: float, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Return ``[rows, width]`` random values ``[u, sign * u]`` along the last dimension."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.empty(rows, width, dtype=dtype)
    middle = (width + 1) // 2
    for part in torch.split(result, _CHUNK_ROWS):  # an LM head in fp32 would need a gigabyte
        half = torch.randn(part.shape[0], middle, generator=generator) * scale
        part[:, :middle] = half
        part[:, middle:] = part[:, : width - middle] * sign
    return result


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return eight hex digits over the bits of results, to compare machines."""
    whole = hashlib.blake2b(digest_size=4)
    for tensor in tensors:
        whole.update(bits(tensor.contiguous()).numpy().tobytes())
    return whole.hexdigest()
