"""Weights as a model's files have them: names and shapes, compared with the family. No torch.

Quantised matrices have several tensors. A value is (level - zero point) * scale. N outputs, K
inputs, G groups of inputs, P levels in 32 bits, lowest bits first:

    fp8, compressed-tensors   weight [N, K], weight_scale(_inv) of a tensor, row, group or block
    ... pack-quantized        weight_packed [N, K / P], weight_scale [N, G],
                              weight_zero_point [N / P, G], weight_g_idx [K]
    awq                       qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]
    gptq                      qweight [K / P, N], qzeros [G, N / P], scales [G, N], g_idx [K]
"""

# ruff: noqa: N806 - names of dimensions

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from baton.engine.models.families import weight_table
from baton.engine.models.family import GLOBAL_NAMES, IGNORED, ROPE_FACTORS, WeightName
from baton.model.artifact import ModelArtifact, ModelError
from baton.model.gguf_file import GgufTensor, open_gguf
from baton.model.hf_quantisation import Quantisation
from baton.model.model_config import TEXT_TYPES
from baton.model.safetensors_file import SIZES, SafetensorsFile, StoredTensor

_LOG = logging.getLogger(__name__)

ROPE_DIVISORS = "rope_factors"
"""Canonical name of GGUF's ``ROPE_FACTORS``."""
WORD_BITS = 32
_PLAIN = ("BF16", "F16", "F32", "F64")
# Files of embedding models lack "model.". Those with images have it twice, by two names.
_DECODER = re.compile(r"^(?:model\.|language_model\.)*(embed_tokens|layers|norm)\.")
_IMAGES = re.compile(r"(?:model\.)?(?:vision_tower|visual|multi_modal_projector)\..+")
_NOT_ZERO = re.compile(rb"[^\0]").search
_BARE_EMBED = "embed_tokens.weight"
_EMBED = GLOBAL_NAMES["embed"][1]
_HEAD = GLOBAL_NAMES["head"][1]

_LEVELS = {"weight": ("F8_E4M3", "I8"), "weight_packed": ("I32",), "qweight": ("I32",)}
_SCALES = ("scales", "weight_scale_inv", "weight_scale")
_PARTS = (*_SCALES, "weight_zero_point", "weight_g_idx", "weight_shape", "qzeros", "g_idx")
# scales of activations and KV, which are not quantised here
_UNUSED = ("input_scale", "activation_scale", "input_zero_point", "output_scale", "k_scale")
_ENDINGS = (*(f".{part}" for part in (*_UNUSED, "v_scale", "q_scale")), "_proj_scales")


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """Quantised matrix.

    Attributes:
        levels: The matrix as it is stored.
        parts: Other tensors by the last part of their names.
        bits: Bits of a level; 0 if it is a number by itself.
    """

    levels: StoredTensor
    parts: Mapping[str, StoredTensor]
    form: Quantisation
    shape: tuple[int, ...]
    bits: int
    dtype: str = "F32"

    @property
    def scale(self) -> StoredTensor:
        """Tensor of the scales; those called inverse are factors, too."""
        return next(self.parts[name] for name in _SCALES if name in self.parts)

    def refuse_misfits(self) -> None:
        """Raise ``ValueError`` if the parts do not fit together."""
        if len(self.shape) != 2 or 0 in self.shape:
            raise ValueError(f"{list(self.shape)} is not a matrix")
        N, K = self.shape
        scale = self.scale.shape
        words = -(-N * self.bits // WORD_BITS)
        fitting: dict[str, Sequence[tuple[int, ...]]]
        if "qzeros" in self.parts:
            G = -(-K // (self.form.group or K))
            fitting = {"scales": [(G, N)], "qzeros": [(G, words)]}
        else:
            height, width = self.form.block or (N, K)
            grid = (-(-N // height), -(-K // width))
            G = scale[-1] if len(scale) == 2 and scale != grid else 1
            single = ((), (1,), (1, 1))
            rows = ((N,), (N, G)) if G and K % G == 0 else ()
            zeros = self.parts.get("weight_zero_point")
            packed = zeros is not None and self.bits and zeros.dtype == "I32"
            fitting = dict.fromkeys(_SCALES, (grid, *single, *rows))
            fitting["weight_zero_point"] = [(words, G)] if packed else (*single, *rows)
        fitting |= {"g_idx": [(K,)], "weight_g_idx": [(K,)], "weight_shape": [(2,)]}
        for name, part in self.parts.items():
            kinds = "FB" if name in _SCALES else "IF" if name == "weight_zero_point" else "I"
            fits = part.dtype in SIZES and part.dtype[0] in kinds
            if not fits or part.shape not in fitting.get(name, ()):
                raise ValueError(f"{name} {list(part.shape)} of {part.dtype} does not fit")


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Matrices ``[experts, K, N]`` in MXFP4.

    ``blocks`` are pairs of values ``[experts, N, G, 16]``, ``scales`` exponents of groups.
    """

    blocks: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    dtype: str = "F32"


Stored = StoredTensor | QuantisedTensor | Mxfp4Tensor


def check_weights(artifact: ModelArtifact) -> None:
    """Compare names and shapes in the weight files with what the family needs; read no weights.

    Raises:
        ModelError: Weights are missing, wrong or unknown, or a file is damaged.
    """
    if artifact.format == "gguf":
        gguf_weights(artifact)
    else:
        with ExitStack() as files:
            safetensors_weights(artifact, files, head_counts=True)


def gguf_weights(artifact: ModelArtifact) -> tuple[list[WeightName], dict[str, GgufTensor]]:
    """Return the weights of the family, with RoPE factors if the file has some, and its tensors."""
    try:
        model = open_gguf(artifact.path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{artifact.path}: cannot be read as GGUF ({error})") from error
    table = weight_table(artifact.config, "gguf")
    stored = {tensor.name: tensor for tensor in model.tensors}
    if ROPE_FACTORS in stored:
        table.append(WeightName(ROPE_DIVISORS, ROPE_FACTORS, (artifact.config.head_dim // 2,)))
    _check_table(artifact, table, {name: t.shape[::-1] for name, t in stored.items()}, {})
    return table, stored


def safetensors_weights(
    artifact: ModelArtifact, files: ExitStack, *, head_counts: bool = False
) -> tuple[list[WeightName], dict[str, Stored]]:
    """Return the weights of the family, and the stored tensors by name.

    ``head_counts``: a tied model's LM head differs from its embedding, which would be compared.
    """
    tensors = _stored_tensors(artifact, files)
    table = weight_table(artifact.config, "safetensors")
    table = _with_head(artifact, table, tensors, head_counts=head_counts)
    _drop_zero_biases(table, tensors)
    unsupported = {name: t.dtype for name, t in tensors.items() if t.dtype not in _PLAIN}
    _check_table(artifact, table, {name: t.shape for name, t in tensors.items()}, unsupported)
    return table, tensors


def _stored_tensors(artifact: ModelArtifact, files: ExitStack) -> dict[str, Stored]:
    """Return the decoder's tensors by the name in ``families.weight_table``."""
    tensors: dict[str, StoredTensor] = {}
    for path in artifact.weight_files:
        for stored, tensor in files.enter_context(SafetensorsFile(path)).tensors.items():
            if artifact.architecture in TEXT_TYPES and _IMAGES.fullmatch(stored):
                continue
            name = _DECODER.sub(r"model.\1.", stored).removeprefix("language_model.")
            if name in tensors:
                raise ModelError(f"{path}: {name} is also in another file")
            tensors[name] = tensor
    if artifact.weight_format is None:
        return dict(tensors)
    try:
        return _joined(tensors, artifact.weight_format)
    except (ValueError, LookupError) as error:
        raise ModelError(f"{artifact.path}: {artifact.weight_format.method}: {error}") from error


def _joined(tensors: Mapping[str, StoredTensor], form: Quantisation) -> dict[str, Stored]:
    """Return the tensors with each quantised matrix as one, ``X.weight``."""
    joined: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if tensor.dtype in _LEVELS.get(kind, ()):
            parts = {part: found for part in _PARTS if (found := tensors.get(f"{stem}.{part}"))}
            if not parts.keys() & set(_SCALES):
                raise ValueError(f"{stem} has no scales")
            try:
                joined[f"{stem}.weight"] = _quantised(tensor, kind, parts, form)
            except (ValueError, LookupError) as error:
                raise ValueError(f"parts of {stem} do not fit: {error}") from error
        elif form.method == "mxfp4" and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            scales = tensors[f"{stem}_scales"]
            experts, outputs, groups, half = tensor.shape
            if (scales.shape, scales.dtype, tensor.dtype) != (tensor.shape[:3], "U8", "U8"):
                raise ValueError(f"scales of {stem} do not fit")
            shape = (experts, groups * half * 2, outputs)
            joined[stem] = Mxfp4Tensor(tensor, scales, shape)
        elif kind not in _PARTS and not name.endswith(_ENDINGS):
            joined[name] = tensor
    return joined


def _quantised(
    levels: StoredTensor, kind: str, parts: Mapping[str, StoredTensor], form: Quantisation
) -> QuantisedTensor:
    shape = levels.shape
    bits = 0
    if kind == "weight_packed":
        stated = parts["weight_shape"]
        raw = bytearray(2 * SIZES[stated.dtype])
        stated.read_into(memoryview(raw))
        half = len(raw) // 2
        shape = int.from_bytes(raw[:half], "little"), int.from_bytes(raw[half:], "little")
        bits = WORD_BITS * levels.shape[1] // max(shape[1], 1)
        if bits not in (4, 8) or levels.shape != (shape[0], -(-shape[1] * bits // WORD_BITS)):
            raise ValueError(f"{list(levels.shape)} words for {list(shape)}")
    elif kind == "qweight":
        parts["qzeros"]  # without which the levels mean nothing
        rows, columns = levels.shape
        bits = form.bits
        packed = WORD_BITS // bits
        shape = (columns, rows * packed) if form.method == "gptq" else (columns * packed, rows)
    matrix = QuantisedTensor(levels, parts, form, shape, bits)
    matrix.refuse_misfits()
    return matrix


def _drop_zero_biases(table: Iterable[WeightName], tensors: dict[str, Stored]) -> None:
    """Forget biases of zeros that AutoGPTQ adds to every matrix."""
    needed = {entry.source for entry in table}
    biases = {name: t for name, t in tensors.items() if name.endswith(".bias")}
    for name, bias in biases.items():
        matrix = tensors.get(name.removesuffix("bias") + "weight")
        is_extra = isinstance(matrix, QuantisedTensor) and name not in needed
        if is_extra and isinstance(bias, StoredTensor) and not any(map(_NOT_ZERO, bias.pieces())):
            del tensors[name]


def _with_head(
    artifact: ModelArtifact,
    table: list[WeightName],
    tensors: Mapping[str, Stored],
    *,
    head_counts: bool,
) -> list[WeightName]:
    """Return the table with the LM head that the file has, as transformers does.

    A tied model may store another head than its embedding. A model for embeddings may lack one.
    """
    stored = tensors.get(_HEAD)
    embed = tensors.get(_EMBED)
    if artifact.config.tie_word_embeddings:
        fits = stored and embed and stored.shape == embed.shape
        if fits and (head_counts or not _equal(stored, embed)):
            shape = artifact.config.vocab_size, artifact.config.hidden_size
            return [*table, WeightName("head", _HEAD, shape)]
    elif stored is None and isinstance(embed, StoredTensor) and embed.name == _BARE_EMBED:
        _LOG.warning("%s has no LM head: only its embeddings make sense", artifact.path)
        return [replace(e, source=_EMBED) if e.name == "head" else e for e in table]
    return table


def _equal(left: Stored | None, right: Stored | None) -> bool:
    """Return whether two tensors have the same bytes."""
    if not (isinstance(left, StoredTensor) and isinstance(right, StoredTensor)):
        return False
    return left.dtype == right.dtype and all(
        a == b for a, b in zip(left.pieces(), right.pieces(), strict=True)
    )


def _check_table(
    artifact: ModelArtifact,
    table: Sequence[WeightName],
    shapes: Mapping[str, tuple[int, ...]],
    unsupported: Mapping[str, str],
) -> None:
    """Compare the weights that a family needs with those in the artifact, before reading.

    ``shapes`` and dtypes that are ``unsupported`` are those of the artifact, by name.

    Raises:
        ModelError: Weights are missing, wrong, or unknown; the message lists the first few.
    """
    problems = []
    for name, shape in {entry.source: entry.shape for entry in table}.items():
        if name not in shapes:
            problems.append(f"{name} is missing")
        elif name in unsupported:
            problems.append(f"{name} has unsupported dtype {unsupported[name]}")
        elif shapes[name] != shape:
            problems.append(f"{name} is {list(shapes[name])}, not {list(shape)}")
    # a tied model may store its head anyway
    known = {entry.source for entry in table} | {ROPE_FACTORS, *GLOBAL_NAMES["head"]}
    unknown = sorted(n for n in shapes.keys() - known if not n.endswith(IGNORED))
    if unknown:
        listed = ", ".join(unknown[:4])
        problems.append(f"{len(unknown)} weights are not part of the family ({listed})")
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ModelError(
            f"{artifact.path}: architecture {artifact.architecture}, "
            f"quantisation {artifact.quantisation}: {shown}{more}"
        )
