"""Safetensors files, read tensor by tensor into memory of our own, and written the same way.

The `safetensors` package maps the whole file: what was copied out of it stays resident beside the
copy until the file is closed, and its writer makes a second copy of everything. Here the peak is
one tensor above what is kept.

    8 bytes: length of the header; the header: JSON, {name: {dtype, shape, data_offsets}}; the data
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; ``tensor[rows]`` reads these rows."""

    file: BinaryIO
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def get_dtype(self) -> str:
        """As the file writes it: ``BF16``, ``I8`` ..."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """Its dimensions."""
        return list(self.shape)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Rows ``a:b`` of the first dimension, read into new memory.

        Raises:
            ValueError: The file has become shorter.
        """
        dtype = DTYPES[self.dtype]
        first, last, _ = rows.indices(self.shape[0])
        tensor = torch.empty((last - first, *self.shape[1:]), dtype=dtype)
        self.file.seek(self.begin + first * prod(self.shape[1:]) * dtype.itemsize)
        data = _raw(tensor)
        done = 0
        while done < len(data):  # Linux reads at most 2 GiB at once
            got = self.file.readinto(data[done:])  # type: ignore[attr-defined]
            if not got:
                raise ValueError(f"{self.name} is truncated")
            done += got
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
            self._tensors, self._metadata = self._read_header(path.stat().st_size)
        except (KeyError, TypeError) as error:
            self._file.close()
            raise ValueError(f"the header is wrong: {error}") from error
        except ValueError:
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

    def metadata(self) -> dict[str, str]:
        """What the writer noted."""
        return self._metadata

    def get_slice(self, name: str) -> StoredTensor:
        """A tensor that is not read yet."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._tensors[name][:]

    def _read_header(self, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        length = int.from_bytes(self._file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size):
            raise ValueError("no header")
        header: dict[str, Any] = json.loads(self._file.read(length))
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            if end > size:
                raise ValueError(f"{name} runs past the end of the file")
            shape, kind = tuple(entry["shape"]), entry["dtype"]
            if kind in DTYPES and end - begin != prod(shape) * DTYPES[kind].itemsize:
                raise ValueError(f"{name}: {end - begin} bytes for {list(shape)} of {kind}")
            tensors[name] = StoredTensor(self._file, name, kind, shape, begin)
        return tensors, metadata


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write contiguous tensors, one after the other, without a copy.

    Raises:
        OSError: The file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_raw(tensor))


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
