"""Opening of a model's weights, whatever their file format.

Unsupported weights are reported before the first one is read. Nothing is unpickled.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from baton.engine.loading.gguf_weights import open_gguf_weights
from baton.engine.loading.quantised_tensor import read_stored
from baton.engine.loading.stored_weights import safetensors_weights
from baton.engine.loading.weights import Progress, Rows, Weights, all_rows, finished, silent
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
    table, tensors = safetensors_weights(artifact, files)
    latest: dict[tuple[str, int], torch.Tensor] = {}  # expert, of which up follows gate

    def read(entry: WeightName) -> torch.Tensor:
        stored = tensors[entry.source]
        if entry.part is None or entry.turn is None:
            weight = read_stored(stored, rows(entry.name), dtype)
        else:
            expert = entry.source, entry.part
            if expert not in latest:
                latest.clear()
                latest[expert] = read_stored(stored, slice(entry.part, entry.part + 1), dtype)[0]
            first, step = entry.turn
            weight = latest[expert].T if latest[expert].ndim > 1 else latest[expert]
            weight = weight[first::step][rows(entry.name)]
        return finished(entry, weight, dtype, artifact.config.head_dim)

    readers = {entry.name: partial(read, entry) for entry in table}
    return Weights(str(artifact.path), readers, progress)
