"""K and V in one byte per value: int8 or fp8 (e4m3), with a scale for each vector.

    stored vector    D bytes of values | 4 bytes: the scale, fp32

**Why a scale per token and head, and not per block.** A block fills up over many steps. A scale for
the whole block would depend on how many of its tokens were there when it was chosen. So it would
depend on how the prompt was cut into chunks and on what was transferred, and ``exact`` would be
impossible. A scale per vector makes the stored bytes a function of that K or V alone. It costs 4
bytes on 64.

Every query reads what is stored, also a prefill chunk its own tokens, so no computation uses a
value that another path would not see. The scale is rounded to the model's dtype first, so that one
multiplication in that dtype restores a value.
"""

from dataclasses import dataclass

import torch

from baton.types.geometry import SCALE_BYTES, KvGeometry

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_TINY = 1e-20  # a vector of zeros has a scale too, so that 0 / scale is 0


@dataclass(frozen=True, slots=True)
class KvCodec:
    """Conversion between the model's K and V and the bytes of the pool."""

    kind: str
    dtype: torch.dtype

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """Encode ``[..., D]`` values as ``[..., D + 4]`` bytes. NaN and Inf decode to NaN."""
        values = kv.float()
        largest = _LARGEST[self.kind]
        scale = values.abs().amax(-1, keepdim=True).mul_(1 / largest).clamp_(min=_TINY)
        scale = scale.to(self.dtype).float()
        scaled = (values / scale).clamp_(-largest, largest)
        if self.kind == "int8":
            stored = scaled.round_().to(torch.int8)
        else:
            stored = scaled.to(torch.float8_e4m3fn)
        return torch.cat((stored.view(torch.uint8), scale.view(torch.uint8)), dim=-1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Invert ``encode``; the result is contiguous."""
        dim = stored.shape[-1] - SCALE_BYTES
        scale = stored[..., dim:].view(torch.float32).to(self.dtype)
        small = stored[..., :dim].view(torch.int8)
        if self.kind == "int8":
            return small.to(self.dtype, memory_format=torch.contiguous_format).mul_(scale)
        return _widened(small, self.dtype).mul_(scale)


def _widened(small: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert e4m3 bits to ``dtype``, ten times as fast as torch's own conversion.

    Sign, exponent and fraction are shifted to their places in the wider type, whose exponent bias
    then differs by 120. NaN needs no handling: its scale is NaN.
    """
    wide, shift = (torch.int16, 4) if dtype == torch.bfloat16 else (torch.int32, 20)
    bits = small.to(wide, memory_format=torch.contiguous_format)
    mask = (-1 << (shift + 11)) | ((1 << (shift + 7)) - 1)
    return bits.bitwise_left_shift_(shift).bitwise_and_(mask).view(dtype).mul_(2.0**120)


def kv_codec(geometry: KvGeometry, dtype: torch.dtype) -> KvCodec | None:
    """Return the codec of a pool, or ``None`` if values are stored unchanged."""
    return KvCodec(geometry.dtype, dtype) if geometry.dtype in _LARGEST else None
