"""From an artifact on disk to a model in memory, weight by weight.

Everything that is not supported is named before the first weight is read. Nothing is ever
unpickled.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from engine.loading.memory import give_back_memory
from engine.loading.gguf_weights import open_gguf_weights
from engine.cpu.linear import ANY_ROWS, Linear, RowCounts, probe_row_counts
from engine.cpu.decoder import Decoder
from engine.models.families import weight_table
from engine.models.family import WeightName
from engine.numerics import DTYPES, Numerics
from engine.cpu.parallel.shard import Shard
from engine.cpu.quantised import packer
from engine.loading.safetensors_file import DTYPES as STORED_DTYPES
from engine.loading.safetensors_file import SafetensorsFile, StoredTensor
from engine.artifacts.artifact import ModelArtifact, ModelConfig, ModelError
from engine.loading.weights import Progress, Rows, Weights, all_rows, check_table, finished, silent

_GIVE_BACK_BYTES = 4 << 20


def load_model(
    artifact: ModelArtifact,
    dtype: str,
    numerics: Numerics,
    *,
    quantisation: str = "none",
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """Load, convert and pack a model.

    Args:
        artifact: From ``resolve_model``.
        dtype: ``bf16`` or ``fp32``.
        numerics: ``exact`` probes the permitted row counts of each weight shape first.
        quantisation: ``none``, ``int8`` or ``int4``: how the layers' weights are kept.
        progress: Called as weights go by.
        cache_dir: Where converted weights are kept, instead of ``$BATON_CACHE``.
        shard: Load this rank's part only; the leader's lets the other ranks load theirs.

    Raises:
        ModelError: Something is missing or not supported; nothing was loaded then.
    """
    report = progress or silent
    quantised = packer(quantisation, dtype)
    probed: dict[tuple[int, int], RowCounts] = {}

    def row_counts(outputs: int, inputs: int) -> RowCounts:
        if numerics == "fast":
            return ANY_ROWS
        shape = (outputs, inputs)
        if shape not in probed:
            report("probe", len(probed), 5)
            probed[shape] = probe_row_counts(outputs, inputs, DTYPES[dtype])
        return probed[shape]

    packed_bytes = 0

    def pack(name: str, weight: torch.Tensor) -> Linear:
        nonlocal packed_bytes
        layer = quantised(name, weight) or Linear(weight, row_counts(*weight.shape))
        packed_bytes += weight.nbytes
        if packed_bytes >= _GIVE_BACK_BYTES:  # else the holes that packing leaves add up
            packed_bytes = 0
            give_back_memory()
        return layer

    if shard is None and quantisation == "none":
        # before any weight is there: the probes need memory of their own
        for shape in dict.fromkeys(_shapes(artifact.config)):
            row_counts(*shape)
    rows = all_rows if shard is None else shard.rows
    label = "" if quantisation == "none" else quantisation
    with open_weights(artifact, dtype, report, cache_dir, rows) as weights:
        if shard is not None:
            shard.load()  # what had to be converted is in the cache now
        model = Decoder(artifact.config, weights, DTYPES[dtype], pack, label, shard)
    give_back_memory()
    return model


def _shapes(c: ModelConfig) -> list[tuple[int, int]]:
    """``(outputs, inputs)`` of the model's products."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    e, f = c.hidden_size, c.intermediate_size
    router = [(c.num_experts, e)] if c.num_experts else []
    return [(c.vocab_size, e), (q + 2 * kv, e), (e, q), (2 * f, e), (e, f), *router]


@contextmanager
def open_weights(
    artifact: ModelArtifact,
    dtype: str,
    progress: Progress = silent,
    cache_dir: Path | None = None,
    rows: Rows = all_rows,
) -> Iterator[Weights]:
    """Weights by canonical name (``families.weight_table``), in ``dtype``, read when asked for.

    Args:
        artifact: From ``resolve_model``.
        dtype: ``bf16`` or ``fp32``.
        progress: Called as weights go by.
        cache_dir: Where converted weights are kept, instead of ``$BATON_CACHE``.
        rows: Gives the rows of each weight that are wanted.

    Raises:
        ModelError: Something is missing or not supported.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    with ExitStack() as files:
        if artifact.format == "gguf":
            yield open_gguf_weights(artifact, dtype, progress, cache_dir, rows, files)
        else:
            yield _open_safetensors(artifact, DTYPES[dtype], progress, rows, files)


def load_weights(
    artifact: ModelArtifact,
    dtype: str,
    *,
    progress: Progress = silent,
    cache_dir: Path | None = None,
) -> dict[str, torch.Tensor]:
    """All weights at once; see ``open_weights``.

    Raises:
        ModelError: Something is missing or not supported.
    """
    with open_weights(artifact, dtype, progress, cache_dir) as weights:
        return {name: weights.pop(name) for name in list(weights)}


def _open_safetensors(
    artifact: ModelArtifact, dtype: torch.dtype, progress: Progress, rows: Rows, files: ExitStack
) -> Weights:
    found: dict[str, StoredTensor] = {}
    for path in artifact.weight_files:
        try:
            file = files.enter_context(SafetensorsFile(path))
        except (ValueError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            if name in found:
                raise ModelError(f"{path}: {name} is in another file too")
            found[name] = file.get_slice(name)
    table = weight_table(artifact.config, "safetensors")
    check_table(artifact, table, found, lambda entry: _problem(entry, found[entry.source]))

    def read(entry: WeightName) -> torch.Tensor:
        stored = found[entry.source][rows(entry.name)]
        return finished(entry, stored, dtype, artifact.config.head_dim)

    readers = {entry.name: partial(read, entry) for entry in table}
    return Weights(str(artifact.path), readers, progress)


def _problem(entry: WeightName, stored: StoredTensor) -> str:
    if stored.dtype not in STORED_DTYPES:
        return f"{entry.source} has dtype {stored.dtype}, not supported"
    if stored.shape != entry.shape:
        return f"{entry.source} is {list(stored.shape)}, not {list(entry.shape)}"
    return ""
