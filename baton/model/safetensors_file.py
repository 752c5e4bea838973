"""Safetensors files: names, dtypes and shapes of the tensors, and the bytes of some. No torch.

The `safetensors` package maps the whole file: copied data stays resident beside the copy until the
file is closed. Here a file is read, tensor by tensor.

    8 bytes: length of the header; the header: JSON, {name: {dtype, shape, data_offsets}}; the data
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from baton.model.model_config import ModelError

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E8M0", "U8", "I8"), 1),
}
"""Bytes of an element, by the dtypes that are read."""
_MAX_HEADER_BYTES = 100_000_000
_MAX_ENTRY_BYTES = 4096
_PIECE_BYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor."""

    file: BinaryIO
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read_into(self, data: memoryview, first_row: int = 0) -> None:
        """Fill ``data`` with bytes from the beginning of a row of the first dimension."""
        self.file.seek(self.begin + first_row * prod(self.shape[1:]) * SIZES[self.dtype])
        read_fully(self.file, data)

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in pieces of at most a megabyte."""
        for begin in range(self.begin, self.end, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, self.end - begin))
            self.file.seek(begin)
            read_fully(self.file, memoryview(piece))
            yield bytes(piece)


class SafetensorsFile:
    """Open safetensors file, with its tensors by name.

    Raises:
        ModelError: The file cannot be opened or is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.file: BinaryIO = path.open("rb", buffering=0)
            try:
                self._read_header(path.stat().st_size)
            except BaseException:
                self.file.close()
                raise
        except (ValueError, OSError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self.file.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("the header is missing or truncated")
        text = bytearray(length)
        read_fully(self.file, memoryview(text))
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = header.pop("__metadata__", b"{}")
        self.metadata = msgspec.json.decode(metadata, type=dict[str, str] | None) or {}
        self.data_begin = 8 + length
        self.tensors = {name: self._stored(name, entry) for name, entry in header.items()}
        _refuse_overlaps(self.tensors.values(), self.data_begin, size)

    def _stored(self, name: str, raw: msgspec.Raw) -> StoredTensor:
        if memoryview(raw).nbytes > _MAX_ENTRY_BYTES:
            raise ValueError(f"{name[:80]}: an entry of more than {_MAX_ENTRY_BYTES} bytes")
        entry = msgspec.json.decode(raw, type=_Entry)
        begin, end = entry.data_offsets
        size = SIZES.get(entry.dtype)
        if size is not None and end - begin != prod(entry.shape) * size:
            shape = list(entry.shape)
            raise ValueError(f"{name[:80]}: {end - begin} bytes for {shape} of {entry.dtype}")
        at = self.data_begin
        return StoredTensor(self.file, name, entry.dtype, entry.shape, at + begin, at + end)


def _refuse_overlaps(tensors: Iterable[StoredTensor], begin: int, size: int) -> None:
    """Raise if there are holes between tensors, or bytes of two tensors."""
    places = sorted((t.begin, t.end, t.name) for t in tensors)
    for (_, end, _), (after, _, name) in pairwise([(0, begin, ""), *places]):
        if after != end:
            raise ValueError(f"{name[:80]} does not begin at the end of the previous tensor")
    last = places[-1][1] if places else begin
    if last > size:
        raise ValueError(f"the file is truncated: {size} bytes of {last}")
    if last < size:
        raise ValueError(f"{size - last} bytes belong to no tensor")


def read_fully(file: BinaryIO, data: memoryview) -> None:
    """Fill ``data`` from the file's position; raise ``ValueError`` if the file is too short."""
    done = 0
    while done < len(data):  # Linux reads at most 2 GiB at once
        got = file.readinto(data[done:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("the file ends too early")
        done += got
