"""Data of safetensors files as tensors, and files that are written tensor by tensor.

The writer of the `safetensors` package makes a second copy of everything. Here the peak is one
tensor above the written data.
"""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from baton.model.safetensors_file import SafetensorsFile, StoredTensor

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CHECKSUM = "checksum"
_BUFFER_BYTES = 1 << 20

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name, in file order."""


def read_rows(stored: StoredTensor, rows: slice = slice(None)) -> torch.Tensor:
    """Read rows ``a:b`` of the first dimension into new memory, or a scalar."""
    first, last, _ = rows.indices(stored.shape[0] if stored.shape else 1)
    tensor = torch.empty((last - first, *stored.shape[1:]), dtype=_DTYPES[stored.dtype])
    stored.read_into(_raw(tensor), first)
    return tensor


def layout_of(file: SafetensorsFile) -> Layout:
    """Return dtype and shape of every tensor; ``bool`` stands for dtypes that are not read."""
    none = torch.bool
    return {name: (_DTYPES.get(t.dtype, none), t.shape) for name, t in file.tensors.items()}


def is_undamaged(file: SafetensorsFile) -> bool:
    """Read all data and return whether it has the checksum in the header."""
    whole = xxhash.xxh3_128()
    buffer = bytearray(_BUFFER_BYTES)
    file.file.seek(file.data_begin)
    while size := file.file.readinto(buffer):  # type: ignore[attr-defined]
        whole.update(memoryview(buffer)[:size])
    return file.metadata.get(_CHECKSUM) == whole.hexdigest()


def write_safetensors(path: Path, layout: Layout, tensors: Iterable[torch.Tensor]) -> None:
    """Write contiguous tensors, in the order of ``layout``, and a checksum, without copies."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin = end
        end = end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    whole = xxhash.xxh3_128()
    with path.open("wb") as file:
        file.write(_header(header, whole.hexdigest()))
        for tensor in tensors:
            whole.update(_raw(tensor))
            file.write(_raw(tensor))
        file.seek(0)
        file.write(_header(header, whole.hexdigest()))


def _header(tensors: Mapping[str, Any], checksum: str) -> bytes:
    """Return the header with its length, which does not depend on the checksum."""
    text = json.dumps({"__metadata__": {_CHECKSUM: checksum}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
