"""Inputs of a step on their way to the device: many small tensors in one copy.

A copy from pageable memory waits for the device, and each costs the CPU about as much as a launch.
So the parts of a step are packed into one piece of pinned memory, and copied without waiting.
"""

from collections.abc import Mapping

import torch

_ALIGNED_BYTES = 256  # of each part: kernels are compiled by alignment


class Packing:
    """Places of several tensors in one piece of memory.

    Args:
        parts: Shape and dtype of each part, by name.
    """

    def __init__(self, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._places: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self.size_bytes = 0
        for name, (shape, dtype) in parts.items():
            size = dtype.itemsize
            for length in shape:
                size *= length
            self._places[name] = (self.size_bytes, size, dtype, shape)
            self.size_bytes += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of ``memory``, which has ``size_bytes`` bytes (uint8)."""
        return {
            name: memory[begin : begin + size].view(dtype).view(shape)
            for name, (begin, size, dtype, shape) in self._places.items()
        }

    def send(self, parts: Mapping[str, torch.Tensor], target: torch.Tensor) -> None:
        """Copy all parts into ``target`` (uint8, on the device) at once, without waiting."""
        # fresh memory: a reused buffer could be overwritten while the device reads it
        host = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=target.is_cuda)
        for name, view in self.views(host).items():
            view.copy_(parts[name])
        copy(host, target)


def upload(device: torch.device, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parts on the device, after one copy."""
    packing = Packing({name: (tuple(part.shape), part.dtype) for name, part in parts.items()})
    target = torch.empty(packing.size_bytes, dtype=torch.uint8, device=device)
    packing.send(parts, target)
    return packing.views(target)


def copy(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copy pinned memory to the device. All inputs go through here, so tests can count copies."""
    target.copy_(host, non_blocking=True)
