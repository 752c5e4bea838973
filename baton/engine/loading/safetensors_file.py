"""Safetensors files, read and written tensor by tensor without mapping the file.

The `safetensors` package maps the whole file: copied data stays resident beside the copy until the
file is closed, and its writer makes a second copy of everything. Here the peak is one tensor above
the copied data.

    8 bytes: length of the header; the header: JSON, {name: {dtype, shape, data_offsets}}; the data
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_PACKED_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_READABLE = DTYPES | _PACKED_DTYPES
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
_CHECKSUM = "checksum"
_BUFFER_BYTES = 1 << 20
# exceptions that a malformed header raises
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name, in file order."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor; ``tensor[rows]`` reads these rows."""

    file: BinaryIO
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Read rows ``a:b`` of the first dimension into new memory, or a scalar."""
        dtype = _READABLE[self.dtype]
        first, last, _ = rows.indices(self.shape[0] if self.shape else 1)
        tensor = torch.empty((last - first, *self.shape[1:]), dtype=dtype)
        self.file.seek(self.begin + first * prod(self.shape[1:]) * dtype.itemsize)
        read_fully(self.file, _raw(tensor))
        return tensor


class SafetensorsFile:
    """Open safetensors file.

    Raises:
        ValueError: The file is not a complete safetensors file.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._read_header(path.stat().st_size)
        except _MALFORMED as error:
            self._file.close()
            raise ValueError(f"malformed header: {type(error).__name__}: {error}") from error
        except (ValueError, OSError):
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> StoredTensor:
        """Return a tensor to read later."""
        return self._tensors[name]

    def layout(self) -> Layout:
        """Return dtype and shape of every tensor; raise ``ValueError`` for unsupported dtypes."""
        if unknown := {t.dtype for t in self._tensors.values()} - set(DTYPES):
            raise ValueError(f"dtypes {sorted(unknown)} are not supported")
        return {name: (DTYPES[t.dtype], t.shape) for name, t in self._tensors.items()}

    def is_undamaged(self) -> bool:
        """Read all data and return whether it has the checksum in the header."""
        whole = xxhash.xxh3_128()
        buffer = bytearray(_BUFFER_BYTES)
        self._file.seek(self._data_begin)
        while size := self._file.readinto(buffer):
            whole.update(memoryview(buffer)[:size])
        return bool(self._metadata.get(_CHECKSUM) == whole.hexdigest())

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("the header is missing or truncated")
        text = bytearray(length)
        read_fully(self._file, memoryview(text))
        header: dict[str, Any] = json.loads(text)
        self._metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
        self._data_begin = 8 + length
        self._tensors = {name: self._stored(name, entry) for name, entry in header.items()}
        _refuse_overlaps(self._tensors.values(), self._data_begin, size)

    def _stored(self, name: str, entry: Mapping[str, Any]) -> StoredTensor:
        kind = entry["dtype"]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name}: shape and offsets must be numbers from 0")
        if kind in _READABLE and end - begin != prod(shape) * _READABLE[kind].itemsize:
            raise ValueError(f"{name}: {end - begin} bytes for {list(shape)} of {kind}")
        at = self._data_begin
        return StoredTensor(self._file, name, kind, shape, at + begin, at + end)


def _refuse_overlaps(tensors: Iterable[StoredTensor], begin: int, size: int) -> None:
    """Raise if there are holes between tensors, or bytes of two tensors."""
    places = sorted((t.begin, t.end, t.name) for t in tensors)
    for (_, end, _), (after, _, name) in pairwise([(0, begin, ""), *places]):
        if after != end:
            raise ValueError(f"{name} does not begin at the end of the previous tensor")
    last = places[-1][1] if places else begin
    if last > size:
        raise ValueError(f"the file is truncated: {size} bytes of {last}")
    if last < size:
        raise ValueError(f"{size - last} bytes belong to no tensor")


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


def read_fully(file: BinaryIO, data: memoryview) -> None:
    """Fill ``data`` from the file's position; raise ``ValueError`` if the file is too short."""
    done = 0
    while done < len(data):  # Linux reads at most 2 GiB at once
        got = file.readinto(data[done:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("the file ends too early")
        done += got


def _raw(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
