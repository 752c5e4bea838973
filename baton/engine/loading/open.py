"""Opening of a model's weights, whatever their file format.

Unsupported weights are reported before the first one is read. Nothing is unpickled.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch

from baton.engine.loading.gguf_weights import gguf_converters, open_gguf_weights
from baton.engine.loading.quantised_tensor import QuantisedTensor, Stored, join_quantised
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
from baton.engine.models.family import GLOBAL_NAMES, WeightName
from baton.engine.numerics import DTYPES
from baton.model.artifact import ModelArtifact, ModelError
from baton.model.hf_keys import TEXT_TYPES

_LOG = logging.getLogger(__name__)

# Files of embedding models lack "model.". Those with images have it twice, by two names.
_DECODER = re.compile(r"^(?:model\.|language_model\.)*(embed_tokens|layers|norm)\.")
_IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|visual|multi_modal_projector)\..+")
_BARE_EMBED = "embed_tokens.weight"
_EMBED = GLOBAL_NAMES["embed"][1]
_HEAD = GLOBAL_NAMES["head"][1]
_COMPARED_ROWS = 8192


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


def check_weights(artifact: ModelArtifact) -> None:
    """Compare names and shapes in the weight files with what the family needs; read no weights.

    Raises:
        ModelError: Weights are missing, wrong or unknown, or a file is damaged.
    """
    with ExitStack() as files:
        if artifact.format == "gguf":
            gguf_converters(artifact, weight_table(artifact.config, "gguf"), "bf16", files)
        else:
            _open_safetensors(artifact, DTYPES["bf16"], silent, all_rows, files)


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
    tensors = _stored_tensors(artifact, dtype, files)
    table = _with_head(artifact, weight_table(artifact.config, "safetensors"), tensors)
    _drop_zero_biases(table, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    unsupported = {name: kind for name, kind in dtypes.items() if kind not in STORED_DTYPES}
    check_table(artifact, table, shapes, unsupported)

    latest: dict[tuple[str, int], torch.Tensor] = {}  # expert, of which up follows gate

    def read(entry: WeightName) -> torch.Tensor:
        stored = tensors[entry.source]
        if entry.part is None or entry.turn is None:
            weight = stored[rows(entry.name)]
        else:
            expert = entry.source, entry.part
            if expert not in latest:
                latest.clear()
                latest[expert] = stored[slice(entry.part, entry.part + 1)][0]
            first, step = entry.turn
            weight = latest[expert].T if latest[expert].ndim > 1 else latest[expert]
            weight = weight[first::step][rows(entry.name)]
        return finished(entry, weight, dtype, artifact.config.head_dim)

    readers = {entry.name: partial(read, entry) for entry in table}
    return Weights(str(artifact.path), readers, progress)


def _stored_tensors(
    artifact: ModelArtifact, dtype: torch.dtype, files: ExitStack
) -> dict[str, Stored]:
    """Return the decoder's tensors by the name in ``families.weight_table``."""
    tensors: dict[str, StoredTensor] = {}
    for path in artifact.weight_files:
        try:
            file = files.enter_context(SafetensorsFile(path))
        except (ValueError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error
        for stored in file.keys():  # noqa: SIM118 - it is not a mapping
            if artifact.architecture in TEXT_TYPES and _IMAGES.fullmatch(stored):
                continue
            name = _DECODER.sub(r"model.\1.", stored).removeprefix("language_model.")
            if name in tensors:
                raise ModelError(f"{path}: {name} is also in another file")
            tensors[name] = file.get_slice(stored)
    if artifact.weight_format is None:
        return dict(tensors)
    try:
        return join_quantised(tensors, artifact.weight_format, dtype)
    except (ValueError, LookupError) as error:
        raise ModelError(f"{artifact.path}: {artifact.weight_format.method}: {error}") from error


def _drop_zero_biases(table: list[WeightName], tensors: dict[str, Stored]) -> None:
    """Forget biases of zeros that AutoGPTQ adds to every matrix."""
    needed = {entry.source for entry in table}
    for name in [name for name in tensors if name.endswith(".bias") and name not in needed]:
        matrix = tensors.get(name.removesuffix("bias") + "weight")
        if isinstance(matrix, QuantisedTensor) and not tensors[name][slice(None)].any():
            del tensors[name]


def _with_head(
    artifact: ModelArtifact, table: list[WeightName], tensors: Mapping[str, Stored]
) -> list[WeightName]:
    """Return the table with the LM head that the file has, as transformers does.

    A tied model may store another head than its embedding. A model for embeddings may lack one.
    """
    stored = tensors.get(_HEAD)
    embed = tensors.get(_EMBED)
    if artifact.config.tie_word_embeddings:
        if stored and embed and stored.shape == embed.shape and not _equal(stored, embed):
            return [*table, WeightName("head", _HEAD, stored.shape)]
    elif stored is None and isinstance(embed, StoredTensor) and embed.name == _BARE_EMBED:
        _LOG.warning("%s has no LM head: only its embeddings make sense", artifact.path)
        return [replace(e, source=_EMBED) if e.name == "head" else e for e in table]
    return table


def _equal(left: Stored, right: Stored) -> bool:
    begins = range(0, left.shape[0], _COMPARED_ROWS)
    pieces = [slice(begin, begin + _COMPARED_ROWS) for begin in begins]
    return all(torch.equal(left[some], right[some]) for some in pieces)
