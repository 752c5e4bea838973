"""GGUF files: the metadata as Python values, and the location of the tensors.

The reader of the `gguf` package makes several numpy arrays for each of the 262,144 strings of a
vocabulary (4 s for Gemma 3; this one: 0.3 s), and each process of a fleet opens the file. Tensor
types and dequantisation still come from the package.

    magic "GGUF", version, number of tensors, number of keys        little-endian
    key, type, value            for each key; an array has its own type and length
    name, dimensions, type, offset                                  for each tensor
    padding to `general.alignment`, then the data

A split file (`NAME-00001-of-00003.gguf`) has the metadata in its first part and tensors in each.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits

from baton.model.locate import parts_of

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_BYTES = 1 << 27  # of metadata
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_ELEMENTS = 1 << 24  # of all arrays together
_MOST_DIMENSIONS = 4
READABLE = frozenset((GGMLQuantizationType.F32, GGMLQuantizationType.F16, *_type_traits))
"""Types of tensors that can be read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of one tensor.

    Attributes:
        path: File that has the tensor.
        shape: Dimensions as in GGUF, innermost first.
    """

    path: Path
    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, and tensors in file order, of all parts of a split file."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    paths: tuple[Path, ...]


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file, or of all its parts, but no tensor.

    Raises:
        ValueError: A file is no complete, little-endian GGUF file of version 2 or 3, or no part.
        OSError: A file cannot be opened.
    """
    paths = parts_of(path)
    files = [_open_part(part) for part in paths]
    counts = {int(file.metadata.get("split.count", 0)) or 1 for file in files}
    numbers = [int(file.metadata.get("split.no", 0)) for file in files]
    if counts != {len(paths)} or numbers != list(range(len(paths))):
        names = f"NAME-00001-of-{max(counts):05}.gguf"
        raise ValueError(f"parts of a split file have the names {names} …, in one folder")
    tensors = [tensor for file in files for tensor in file.tensors]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("two tensors have the same name")
    return GgufFile(files[0].metadata, tensors, paths)


def _open_part(path: Path) -> GgufFile:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no regular file")
    buffer = np.memmap(path, mode="r")
    try:
        return _Reader(path, buffer).read()
    except (struct.error, OverflowError) as error:  # a length beyond the end of the file
        raise ValueError(f"the file ends too early: {error}") from error


class _Reader:
    def __init__(self, path: Path, buffer: npt.NDArray[np.uint8]) -> None:
        self._path = path
        self._size = len(buffer)
        self._bytes = buffer.view(np.ndarray).data[:_MOST_BYTES]
        self._at = 0
        self._elements = 0

    def read(self) -> GgufFile:
        magic, version, tensors, keys = self._take("4sIQQ")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError(f"magic {magic!r}, version {version} is not supported")
        if keys > _MOST_KEYS or tensors > _MOST_TENSORS:
            raise ValueError(f"{keys} keys and {tensors} tensors are too many")
        metadata = {}
        for _ in range(keys):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        infos = [self._info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment = {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        located = [self._tensor(begin, *info) for info in infos]
        _refuse_overlaps(located)
        return GgufFile(metadata, located, (self._path,))

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise ValueError(f"metadata type {kind} is not supported")
        kind, count = self._take("IQ")
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise ValueError(f"arrays of more than {_MOST_ELEMENTS} elements")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"array type {kind} is not supported")
        return list(self._take(f"{count}{_SCALARS[kind]}"))

    def _strings(self, count: int) -> list[str]:
        """Read many strings without a function call for each."""
        strings = []
        data = self._bytes
        at = self._at
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            strings.append(str(data[begin:at], "utf-8"))
        if at > len(data):
            raise ValueError("a string ends after the file, or is too long")
        self._at = at
        return strings

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name[:80]}: {dimensions} dimensions")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, shape, kind, offset

    def _tensor(
        self, begin: int, name: str, shape: tuple[int, ...], kind_id: int, offset: int
    ) -> GgufTensor:
        if kind_id not in iter(GGMLQuantizationType):
            raise ValueError(f"{name}: tensor type {kind_id} is not supported")
        kind = GGMLQuantizationType(kind_id)
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[0] % block:
            raise ValueError(f"{name}: {shape} is not a multiple of {kind.name} blocks of {block}")
        count = math.prod(shape) // block * size
        if begin + offset + count > self._size:
            raise ValueError(f"{name} is truncated")
        return GgufTensor(self._path, name, kind, shape, begin + offset, count)


def _refuse_overlaps(tensors: Iterable[GgufTensor]) -> None:
    places = sorted((t.begin, t.begin + t.size_bytes, t.name) for t in tensors)
    for (_, end, before), (begin, _, name) in pairwise(places):
        if begin < end:
            raise ValueError(f"{before} and {name} overlap")
