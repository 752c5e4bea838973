"""Opening of a model's weights, whatever their file format.

Unsupported weights are reported before the first one is read. Nothing is unpickled.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from baton.engine.loading.gguf_weights import open_gguf_weights
from baton.engine.loading.safetensors_file import DTYPES as STORED_DTYPES
from baton.engine.loading.safetensors_file import SafetensorsFile, StoredTensor
from baton.engine.loading.weights import (
    Progress,
    Rows,
    Weights,
    all_rows,
    check_table,
    finished,
    silent,
)
from baton.engine.models.families import weight_table
from baton.engine.models.family import WeightName
from baton.engine.numerics import DTYPES
from baton.model.artifact import ModelArtifact, ModelError


@contextmanager
def open_weights(
    artifact: ModelArtifact,
    dtype: str,
    progress: Progress = silent,
    rows: Rows = all_rows,
) -> Iterator[Weights]:
    """Open weights by canonical name (``families.weight_table``), in ``dtype``, read on access.

    Args:
        artifact: Result of ``resolve_model``.
        dtype: ``bf16`` or ``fp32``.
        progress: Receives the progress of conversion and reading.
        rows: Returns the rows to read of each weight.

    Raises:
        ModelError: A weight is missing or not supported.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    with ExitStack() as files:
        if artifact.format == "gguf":
            yield open_gguf_weights(artifact, dtype, progress, rows, files)
        else:
            yield _open_safetensors(artifact, DTYPES[dtype], progress, rows, files)


def load_weights(
    artifact: ModelArtifact,
    dtype: str,
    *,
    progress: Progress = silent,
) -> dict[str, torch.Tensor]:
    """Read all weights at once; see ``open_weights``."""
    with open_weights(artifact, dtype, progress) as weights:
        return {name: weights.pop(name) for name in list(weights)}


def _open_safetensors(
    artifact: ModelArtifact, dtype: torch.dtype, progress: Progress, rows: Rows, files: ExitStack
) -> Weights:
    tensors: dict[str, StoredTensor] = {}
    for path in artifact.weight_files:
        try:
            file = files.enter_context(SafetensorsFile(path))
        except (ValueError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            if name in tensors:
                raise ModelError(f"{path}: {name} is also in another file")
            tensors[name] = file.get_slice(name)
    table = weight_table(artifact.config, "safetensors")
    check_table(artifact, table, tensors, lambda entry: _problem(entry, tensors[entry.source]))

    def read(entry: WeightName) -> torch.Tensor:
        stored = tensors[entry.source][rows(entry.name)]
        return finished(entry, stored, dtype, artifact.config.head_dim)

    readers = {entry.name: partial(read, entry) for entry in table}
    return Weights(str(artifact.path), readers, progress)


def _problem(entry: WeightName, stored: StoredTensor) -> str:
    if stored.dtype not in STORED_DTYPES:
        return f"{entry.source} has unsupported dtype {stored.dtype}"
    if stored.shape != entry.shape:
        return f"{entry.source} is {list(stored.shape)}, not {list(entry.shape)}"
    return ""
