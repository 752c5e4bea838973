"""Safetensors files, read tensor by tensor into memory of our own, and written the same way.

The `safetensors` package maps the whole file: what was copied out of it stays resident beside the
copy until the file is closed, and its writer makes a second copy of everything. Here the peak is
one tensor above what is kept.

    8 bytes: length of the header; the header: JSON, {name: {dtype, shape, data_offsets}}; the data
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import xxhash

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
_CHECKSUM = "checksum"
_BUFFER_BYTES = 1 << 20
# what a header of another form than expected raises
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name, in the order of the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; ``tensor[rows]`` reads these rows."""

    file: BinaryIO
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Rows ``a:b`` of the first dimension, read into new memory.

        Raises:
            ValueError: The file has become shorter.
        """
        dtype = DTYPES[self.dtype]
        first, last, _ = rows.indices(self.shape[0])
        tensor = torch.empty((last - first, *self.shape[1:]), dtype=dtype)
        self.file.seek(self.begin + first * prod(self.shape[1:]) * dtype.itemsize)
        read_fully(self.file, _raw(tensor))
        return tensor


class SafetensorsFile:
    """An open file.

    Raises:
        ValueError: It is not a complete safetensors file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._read_header(path.stat().st_size)
        except _NONSENSE as error:
            self._file.close()
            raise ValueError(f"the header is wrong: {type(error).__name__}: {error}") from error
        except (ValueError, OSError):
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> StoredTensor:
        """A tensor that is not read yet."""
        return self._tensors[name]

    def layout(self) -> Layout:
        """Dtype and shape of every tensor.

        Raises:
            ValueError: One has a dtype that is not read.
        """
        if unknown := {t.dtype for t in self._tensors.values()} - set(DTYPES):
            raise ValueError(f"dtypes {sorted(unknown)} are not read")
        return {name: (DTYPES[t.dtype], t.shape) for name, t in self._tensors.items()}

    def is_undamaged(self) -> bool:
        """Whether the data has the checksum that ``write_safetensors`` noted. Reads all of it."""
        whole = xxhash.xxh3_128()
        buffer = bytearray(_BUFFER_BYTES)
        self._file.seek(self._data_begin)
        while size := self._file.readinto(buffer):
            whole.update(memoryview(buffer)[:size])
        return bool(self._metadata.get(_CHECKSUM) == whole.hexdigest())

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("no header, or a part of one")
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
        if kind in DTYPES and end - begin != prod(shape) * DTYPES[kind].itemsize:
            raise ValueError(f"{name}: {end - begin} bytes for {list(shape)} of {kind}")
        at = self._data_begin
        return StoredTensor(self._file, name, kind, shape, at + begin, at + end)


def _refuse_overlaps(tensors: Iterable[StoredTensor], begin: int, size: int) -> None:
    """The format asks for data without holes, in which no byte belongs to two tensors."""
    places = sorted((t.begin, t.end, t.name) for t in tensors)
    for (_, end, _), (after, _, name) in pairwise([(0, begin, ""), *places]):
        if after != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
    last = places[-1][1] if places else begin
    if last > size:
        raise ValueError(f"{size} bytes are there, {last} are needed: the file is truncated")
    if last < size:
        raise ValueError(f"{size - last} bytes belong to no tensor")


def write_safetensors(path: Path, layout: Layout, tensors: Iterable[torch.Tensor]) -> None:
    """Write contiguous tensors, one after the other, without a copy; then a checksum of them all.

    Args:
        path: Is overwritten.
        layout: What ``tensors`` are.
        tensors: In the order of ``layout``.

    Raises:
        OSError: The file cannot be written.
    """
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
    """The header with its length; as long for one checksum as for another."""
    text = json.dumps({"__metadata__": {_CHECKSUM: checksum}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_fully(file: BinaryIO, data: memoryview) -> None:
    """Fill ``data`` from where the file stands.

    Raises:
        ValueError: It ends before.
    """
    done = 0
    while done < len(data):  # Linux reads at most 2 GiB at once
        got = file.readinto(data[done:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("the file ends too early")
        done += got


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
