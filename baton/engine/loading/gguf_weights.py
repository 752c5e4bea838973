"""GGUF weights, dequantised once and cached in ``$BATON_CACHE`` as safetensors.

A damaged cache file fails its checksum and is recreated. If the cache cannot be written, each start
dequantises every weight when it is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize

from baton.engine.loading.file_lock import exclusively
from baton.engine.loading.safetensors_data import (
    Layout,
    is_undamaged,
    layout_of,
    read_rows,
    write_safetensors,
)
from baton.engine.loading.stored_weights import ROPE_DIVISORS, gguf_weights
from baton.engine.loading.weights import Progress, Rows, Weights, finished, silent
from baton.engine.models.families import weight_table
from baton.engine.models.family import WeightName
from baton.engine.numerics import DTYPES
from baton.folders import cache_root
from baton.model.artifact import ModelArtifact
from baton.model.gguf_file import GgufTensor
from baton.model.safetensors_file import SafetensorsFile, read_fully
from baton.telemetry.process_memory import give_back

_CACHE_FORMAT = 3
_CHUNK_ELEMENTS = 1 << 19  # elements dequantised at once: numpy needs about 30 bytes each

Reader = Callable[[slice], torch.Tensor]
"""Function that reads some rows of a weight."""


def open_gguf_weights(
    artifact: ModelArtifact, dtype: str, progress: Progress, rows: Rows, files: ExitStack
) -> Weights:
    """Open the weights of a GGUF file; ``open_weights`` describes the arguments."""
    name = f"{artifact.weights_digest.hex()}-{dtype}-v{_CACHE_FORMAT}.safetensors"
    path = cache_root() / "weights" / name
    expected = _layout(weight_table(artifact.config, "gguf"), dtype)
    readers = _open_cache(path, expected, files)
    if readers is None:
        # Other workers start at the same moment, and hosts may share the folder.
        with exclusively(path.parent.parent / "locks" / path.stem):
            readers = _open_cache(path, expected, files)
            if readers is None:
                readers = _converted(artifact, dtype, path, progress, files)
    own_rows = {name: partial(read, rows(name)) for name, read in readers.items()}
    return Weights(str(artifact.path), own_rows, progress)


def _converted(
    artifact: ModelArtifact, dtype: str, path: Path, progress: Progress, files: ExitStack
) -> Mapping[str, Reader]:
    """Convert and cache the weights; without a cache, convert while reading."""
    table, stored = gguf_weights(artifact)
    opened = {p: files.enter_context(p.open("rb", buffering=0)) for p in artifact.weight_files}

    def convert(entry: WeightName, rows: slice) -> torch.Tensor:
        tensor = stored[entry.source]
        file = opened[tensor.path]
        weight = _dequantised(file, tensor, entry.part, rows, DTYPES[dtype])
        return finished(entry, weight, DTYPES[dtype], artifact.config.head_dim)

    converters = {entry.name: partial(convert, entry) for entry in table}
    layout = _layout(table, dtype)
    _write_cache(path, layout, artifact, converters, progress)
    give_back()
    return _open_cache(path, layout, files) or converters


def _dequantised(
    file: BinaryIO, tensor: GgufTensor, part: int | None, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows of a matrix in ``dtype``, or elements of a vector in fp32.

    A few rows at a time, because numpy needs several times the final size. The file is read and not
    mapped: mapped pages count as the process's memory, and a truncated file would kill it.
    """
    shape = tuple(reversed(tensor.shape))[0 if part is None else 1 :]
    if len(shape) == 1:
        size = tensor.size_bytes * shape[0] // tensor.n_elements
        return torch.from_numpy(_values(file, tensor, (part or 0) * size, size)[rows].copy())
    row_bytes = tensor.size_bytes * shape[1] // tensor.n_elements
    begin = (part or 0) * shape[0] * row_bytes
    first, last, _ = rows.indices(shape[0])
    weight = torch.empty((last - first, shape[1]), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // shape[1])
    for some in torch.split(weight, step):
        values = _values(file, tensor, begin + first * row_bytes, len(some) * row_bytes)
        some.copy_(torch.from_numpy(values).view(some.shape))
        first += len(some)
    return weight


def _values(file: BinaryIO, tensor: GgufTensor, begin: int, size: int) -> npt.NDArray[np.float32]:
    data = np.empty(size, dtype=np.uint8)
    file.seek(tensor.begin + begin)
    read_fully(file, data.data)
    values: npt.NDArray[Any] = dequantize(data, tensor.tensor_type)
    return values.astype(np.float32, copy=False)


def _layout(table: Iterable[WeightName], dtype: str) -> Layout:
    return {
        entry.name: (torch.float32 if len(entry.own_shape) == 1 else DTYPES[dtype], entry.own_shape)
        for entry in table
    }


def _open_cache(path: Path, layout: Layout, files: ExitStack) -> Mapping[str, Reader] | None:
    try:
        file = files.enter_context(SafetensorsFile(path))
        kept = layout_of(file)
        factors = {name: kept[name] for name in (ROPE_DIVISORS,) if name in kept}
        if kept != {**layout, **factors} or not is_undamaged(file):
            return None
    except (ValueError, OSError):
        return None
    return {name: partial(read_rows, tensor) for name, tensor in file.tensors.items()}


def _write_cache(
    path: Path,
    layout: Layout,
    artifact: ModelArtifact,
    converters: Mapping[str, Reader],
    progress: Progress,
) -> None:
    """Write to a temporary folder, then rename, so that readers see all or nothing."""
    whole = {name: partial(read, slice(None)) for name, read in converters.items()}
    weights = Weights(str(artifact.path), whole, silent)

    def converted() -> Iterator[torch.Tensor]:
        for done, name in enumerate(layout, 1):
            yield weights.pop(name)
            progress("convert", done, len(layout))

    with suppress(OSError):  # a full disk is no error
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent) as folder:
            write_safetensors(Path(folder) / path.name, layout, converted())
            (Path(folder) / path.name).replace(path)
