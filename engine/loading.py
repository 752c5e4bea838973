"""From an artifact on disk to a model in memory.

Everything that is not supported is named before the first weight is read. GGUF weights are
dequantised once and kept as safetensors in ``$BATON_CACHE`` (default ``~/.cache/baton``); a damaged
file there is noticed by its checksum and made again. Nothing is ever unpickled.
"""

import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import xxhash

from engine.linear import ANY_ROWS, Linear, RowCounts, probe_row_counts
from engine.models.decoder import Decoder
from engine.models.families import weight_table
from engine.models.family import GLOBAL_NAMES, IGNORED, ROPE_FACTORS, WeightName
from engine.models.rope import pair_rows
from engine.numerics import DTYPES, Numerics
from engine.parallel import Shard
from engine.quantised import packer
from engine.safetensors_file import DTYPES as STORED_DTYPES
from engine.safetensors_file import SafetensorsFile, write_safetensors
from engine.text.artifact import ModelArtifact, ModelConfig, ModelError
from engine.text.gguf_file import open_gguf

Progress = Callable[[str, int, int], None]
"""``(stage, done, total)``; the stages are "convert", "read", "pack"."""

Rows = Callable[[str], slice]
"""Canonical name of a weight -> the rows of it that are wanted."""

CACHE_FORMAT = 2
_CHUNK_ELEMENTS = 1 << 22  # dequantised at a time


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""


def _all_rows(name: str) -> slice:
    return slice(None)


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
    report = progress or _silent
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

    def pack(name: str, weight: torch.Tensor) -> Linear:
        layer = quantised(name, weight)
        return layer or Linear(weight, row_counts(*weight.shape))

    if shard is None and quantisation == "none":
        # before any weight is there: the probes need memory of their own
        for shape in dict.fromkeys(_shapes(artifact.config)):
            row_counts(*shape)
    rows = _all_rows if shard is None else shard.rows
    weights = load_weights(artifact, dtype, progress=report, cache_dir=cache_dir, rows=rows)
    if shard is not None:
        shard.load()  # what had to be converted is in the cache now
    label = "" if quantisation == "none" else quantisation
    return Decoder(artifact.config, weights, DTYPES[dtype], pack, label, shard)


def _shapes(c: ModelConfig) -> list[tuple[int, int]]:
    """``(outputs, inputs)`` of the model's products."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    e, f = c.hidden_size, c.intermediate_size
    router = [(c.num_experts, e)] if c.num_experts else []
    return [(c.vocab_size, e), (q + 2 * kv, e), (e, q), (2 * f, e), (e, f), *router]


def load_weights(
    artifact: ModelArtifact,
    dtype: str,
    *,
    progress: Progress = _silent,
    cache_dir: Path | None = None,
    rows: Rows = _all_rows,
) -> dict[str, torch.Tensor]:
    """Weights by canonical name (``families.weight_table``), contiguous, in ``dtype``.

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
    if artifact.format == "safetensors":
        return _read_safetensors(artifact, DTYPES[dtype], progress, rows)
    cached = _cache_path(artifact, dtype, cache_dir)
    weights = _read_cache(cached, rows)
    if weights is None:
        weights = _read_gguf(artifact, DTYPES[dtype], progress)
        _write_cache(cached, weights)
        for name in weights if rows is not _all_rows else ():
            weights[name] = weights[name][rows(name)].clone()
    return weights


# --- safetensors -------------------------------------------------------------------------------


def _read_safetensors(
    artifact: ModelArtifact, dtype: torch.dtype, progress: Progress, rows: Rows
) -> dict[str, torch.Tensor]:
    handles: dict[str, SafetensorsFile] = {}
    with ExitStack() as files:
        try:
            for path in artifact.weight_files:
                handle = files.enter_context(SafetensorsFile(path))
                handles.update(dict.fromkeys(handle.keys(), handle))
        except (ValueError, OSError) as error:
            raise ModelError(f"{path}: cannot be read as safetensors ({error})") from error
        return _read_shards(artifact, handles, dtype, progress, rows)


def _read_shards(
    artifact: ModelArtifact,
    handles: Mapping[str, SafetensorsFile],
    dtype: torch.dtype,
    progress: Progress,
    rows: Rows,
) -> dict[str, torch.Tensor]:
    """The weights; ``handles`` says which file holds which."""
    table = weight_table(artifact.config, "safetensors")
    problems = []
    for entry in table:
        if entry.source not in handles:
            problems.append(f"{entry.source} is missing")
            continue
        part = handles[entry.source].get_slice(entry.source)
        if part.get_dtype() not in STORED_DTYPES:
            problems.append(f"{entry.source} has dtype {part.get_dtype()}, not supported")
        if tuple(part.get_shape()) != entry.shape:
            problems.append(f"{entry.source} is {part.get_shape()}, not {list(entry.shape)}")
    _refuse(artifact, problems, _unknown(handles, table))
    weights = {}
    for done, entry in enumerate(table):
        weight = handles[entry.source].get_slice(entry.source)[rows(entry.name)]
        weights[entry.name] = _finished(entry, weight, dtype, artifact.config.head_dim)
        progress("read", done + 1, len(table))
    return weights


def _finished(
    entry: WeightName, weight: torch.Tensor, dtype: torch.dtype, head_dim: int
) -> torch.Tensor:
    """A weight as the model wants it. Norms and biases stay in fp32: they are small."""
    weight = weight.to(torch.float32 if weight.ndim == 1 else dtype)
    if entry.add_one:
        weight = weight + 1.0
    return (pair_rows(weight, head_dim) if entry.pairs else weight).contiguous()


def _unknown(names: Iterable[str], table: list[WeightName]) -> list[str]:
    known = {entry.source for entry in table}
    # a tied model may store its head all the same
    known |= {ROPE_FACTORS, *GLOBAL_NAMES["head"]}
    return [n for n in names if n not in known and not n.endswith(IGNORED)]


def _refuse(artifact: ModelArtifact, problems: list[str], unknown: list[str]) -> None:
    if unknown:
        listed = ", ".join(sorted(unknown)[:4])
        problems.append(f"{len(unknown)} weights are not part of the family ({listed})")
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"{artifact.path}: architecture {artifact.architecture}, "
            f"quantisation {artifact.quantisation}: {shown}{more}"
        )


# --- GGUF --------------------------------------------------------------------------------------


def _read_gguf(
    artifact: ModelArtifact, dtype: torch.dtype, progress: Progress
) -> dict[str, torch.Tensor]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import _type_traits, dequantize

    native = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    found = {tensor.name: tensor for tensor in open_gguf(artifact.path).tensors}
    table = weight_table(artifact.config, "gguf")
    problems = []
    for entry in table:
        tensor = found.get(entry.source)
        if tensor is None:
            problems.append(f"{entry.source} is missing")
            continue
        kind = tensor.tensor_type
        if kind not in native and kind not in _type_traits:
            problems.append(f"{entry.source} is {kind.name}, which gguf cannot dequantise")
        shape = tuple(reversed(tensor.shape))
        if shape != entry.shape:
            problems.append(f"{entry.source} is {list(shape)}, not {list(entry.shape)}")
    _refuse(artifact, problems, _unknown(found, table))

    def read(source: str, part: int | None = None) -> torch.Tensor:
        """Dequantised a few rows at a time, because fp32 takes several times the final size."""
        tensor = found[source]
        shape = tuple(reversed(tensor.shape))[0 if part is None else 1 :]
        data = tensor.data if part is None else tensor.data[part]
        weight = torch.empty(shape, dtype=torch.float32 if len(shape) == 1 else dtype)
        rows = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
        for begin in range(0, shape[0], rows if len(shape) > 1 else shape[0]):
            some = slice(begin, begin + rows) if len(shape) > 1 else slice(None)
            values = dequantize(data[some], tensor.tensor_type).astype(np.float32)
            weight[some] = torch.from_numpy(values)
        return weight

    weights = {}
    for done, entry in enumerate(table):
        weight = read(entry.source, entry.part)
        weights[entry.name] = _finished(entry, weight, dtype, artifact.config.head_dim)
        progress("convert", done + 1, len(table))
    if ROPE_FACTORS in found:
        weights["rope_factors"] = read(ROPE_FACTORS)
    return weights


# --- the cache of converted weights ------------------------------------------------------------


def _cache_path(artifact: ModelArtifact, dtype: str, cache_dir: Path | None) -> Path:
    root = cache_dir or Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")
    name = f"{artifact.weights_digest.hex()}-{dtype}-v{CACHE_FORMAT}.safetensors"
    return root / "weights" / name


def _checksum(weights: dict[str, torch.Tensor]) -> str:
    whole = xxhash.xxh3_128()
    for name in sorted(weights):
        whole.update(struct.pack("<q", weights[name].numel()) + name.encode())
        whole.update(weights[name].view(-1).view(torch.uint8).numpy().data)
    return str(whole.hexdigest())


def _read_cache(path: Path, rows: Rows) -> dict[str, torch.Tensor] | None:
    """The cached weights, or ``None`` when there are none or they are damaged."""
    if not path.exists():
        return None
    try:
        with SafetensorsFile(path) as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = file.metadata().get("checksum")
    except (ValueError, OSError):
        return None
    if expected != _checksum(weights):
        return None
    if rows is not _all_rows:
        for name in weights:
            weights[name] = weights[name][rows(name)].clone()
    return weights


def _write_cache(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write beside and rename, so that a reader sees all or nothing. A full disk is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path.parent) as temporary:
            write_safetensors(temporary, weights, {"checksum": _checksum(weights)})
            temporary.replace(path)
    except OSError:
        return


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=folder, suffix=".partial")
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
