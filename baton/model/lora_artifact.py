"""Description of a LoRA adapter on disk, checked against a model without torch.

An adapter is a directory in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``. For a projection ``W`` it contains ``A`` (rank x inputs) and ``B``
(outputs x rank), and the model computes ``W x + scale * B (A x)``.

Options with another formula are rejected by name. No file identifies the base weights, so the shape
of every matrix must fit.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.model.artifact import ModelConfig, ModelError
from baton.model.safetensors_file import SafetensorsFile
from baton.types.errors import AdapterLoadError
from baton.types.params import AdapterRef

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
DIGEST_BYTES = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_DTYPES = ("BF16", "F16", "F32")
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(
    r"(?:[a-z_]+\.)*layers\.(\d{1,5})\.(?:self_attn|mlp)\.([a-z]+_proj)\.lora_([AB])"
    r"(?:\.default)?\.weight"
)
_PATTERN_KEY = re.compile(r"(\^?)([A-Za-z0-9_.]{1,200})\$?")
# Initialisations with which PEFT also changes the base weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of ``adapter_config.json``: read below, or without effect on inference. Another key with a
# value is refused.
_HONOURED = """
    peft_type task_type bias r lora_alpha rank_pattern alpha_pattern use_rslora init_lora_weights
    target_modules
"""
_NO_EFFECT = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules inference_mode layers_pattern layers_to_transform loftq_config lora_dropout
    lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config
"""
_KNOWN = frozenset((_HONOURED + _NO_EFFECT).split())


class AdapterError(ModelError):
    """The adapter cannot be used with this model."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Projection of one layer that the adapter changes.

    Attributes:
        target: One of ``TARGETS``.
        a_name: Name of ``A`` in the weights file, ``[rank, inputs]``.
        b_name: Name of ``B`` in the weights file, ``[outputs, rank]``.
    """

    layer: int
    target: str
    rank: int
    scale: float
    a_name: str
    b_name: str


@dataclass(frozen=True, slots=True)
class AdapterArtifact:
    """Adapter that fits a model.

    Attributes:
        digest: 16 bytes over the config and every byte of the weights.
        weights: Changed projections, by layer.
    """

    path: Path
    digest: bytes
    rank: int
    weights: tuple[LowRank, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the projections changed in any layer."""
        adapted = {part.target for part in self.weights}
        return tuple(target for target in TARGETS if target in adapted)


def target_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return ``(outputs, inputs)`` of each projection that an adapter may change.

    In a mixture of experts only attention may be changed.
    """
    c = config
    q = c.num_heads * c.head_dim
    kv = c.num_kv_heads * c.head_dim
    e = c.hidden_size
    f = c.intermediate_size
    shapes = ((q, e), (kv, e), (kv, e), (e, q), (f, e), (f, e), (e, f))
    every = dict(zip(TARGETS, shapes, strict=True))
    return {name: every[name] for name in TARGETS[:4]} if c.num_experts else every


def read_adapter(path: str | Path, config: ModelConfig, max_rank: int) -> AdapterArtifact:
    """Check an adapter against a model. Reads every byte once, for the digest.

    Raises:
        AdapterError: The adapter is incomplete, does not fit, or is not supported.
    """
    try:
        return _checked(Path(path).expanduser(), config, max_rank)
    except (OSError, RuntimeError, OverflowError) as error:  # no permission, unknown user, …
        raise AdapterError(f"{str(path)[:200]}: cannot be read ({error})") from error


def read_same(ref: AdapterRef, config: ModelConfig, max_rank: int) -> AdapterArtifact:
    """Read an adapter that the router has read.

    Raises:
        AdapterLoadError: It does not fit, or has another digest.
    """
    try:
        artifact = read_adapter(ref.path, config, max_rank)
    except AdapterError as error:
        raise AdapterLoadError(f"adapter {ref.name}: {error}") from error
    if artifact.digest.hex() != ref.digest:
        raise AdapterLoadError(
            f"adapter {ref.name}: {ref.path} has changed since it was loaded (digest "
            f"{artifact.digest.hex()}, not {ref.digest}); unload it and load it again"
        )
    return artifact


def _checked(folder: Path, config: ModelConfig, max_rank: int) -> AdapterArtifact:
    if not folder.is_dir():
        raise AdapterError(f"{folder}: not a directory that contains {CONFIG_FILE}")
    raw = _read_config(folder / CONFIG_FILE)
    settings = _parse_config(folder / CONFIG_FILE, raw)
    file = folder / WEIGHTS_FILE
    weights = _match(file, _header(file), settings, target_shapes(config), config.num_layers)
    rank = max(part.rank for part in weights)
    if rank > max_rank:
        raise AdapterError(f"{folder}: rank {rank} is above adapters.max_rank = {max_rank}")
    digest = hashlib.blake2b(raw, digest_size=DIGEST_BYTES)
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return AdapterArtifact(folder, digest.digest(), rank, weights)


def _read_config(file: Path) -> bytes:
    if file.exists() and not file.is_file():  # a pipe may never end
        raise AdapterError(f"{file}: not a regular file")
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{file}: cannot be read ({error.strerror})") from error
    if len(raw) > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{file}: larger than {_MAX_CONFIG_BYTES} bytes")
    return raw


def _parse_config(file: Path, raw: bytes) -> Mapping[str, Any]:
    try:
        settings = json.loads(raw)
    except ValueError as error:
        raise AdapterError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{file}: must contain a JSON object")
    for problem in _problems(settings):
        raise AdapterError(f"{file}: {problem}")
    return settings


def _problems(settings: Mapping[str, Any]) -> "list[str]":
    problems = []
    kind = settings.get("peft_type")
    if kind != "LORA":
        problems.append(f"peft_type is {kind!r}; only LORA is supported")
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        problems.append(f"task_type {settings['task_type']!r} is not supported (only CAUSAL_LM)")
    if settings.get("bias", "none") != "none":
        problems.append(f"bias is {settings['bias']!r}; only 'none' is supported")
    if not _is_count(settings.get("r")):
        problems.append(f"r is {settings.get('r')!r}; it must be a positive whole number")
    if not _is_number(settings.get("lora_alpha")):
        problems.append(f"lora_alpha is {settings.get('lora_alpha')!r}; it must be a number")
    start = str(settings.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGED_BASE):
        problems.append(f"init_lora_weights {start!r} changes the base weights: not supported")
    problems += _pattern_problems(settings)
    targets = settings.get("target_modules")
    if isinstance(targets, list):
        unknown = [name for name in targets if str(name).rsplit(".", 1)[-1] not in TARGETS]
        if unknown:
            problems.append(
                f"target_modules {unknown[:4]} cannot be changed (only {list(TARGETS)})"
            )
    elif targets is not None and not isinstance(targets, str):
        problems.append(f"target_modules is {targets!r}; it must be a list or a string")
    for key, value in settings.items():
        if key not in _KNOWN and value not in (None, False, [], {}, ""):
            problems.append(f"{str(key)[:80]!r} = {str(value)[:80]} is not supported")
    return problems


def _pattern_problems(settings: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, fits in (("rank_pattern", _is_count), ("alpha_pattern", _is_number)):
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict):
            problems.append(f"{key} must be an object")
            continue
        for name, value in patterns.items():
            if not _PATTERN_KEY.fullmatch(name):  # regular expressions of users are never executed
                problems.append(f"{key}: {name[:80]!r} is not a plain module name: not supported")
            elif not fits(value):
                problems.append(f"{key}: {name!r} has invalid value {value!r}")
    return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _by_module(settings: Mapping[str, Any], key: str, default: str, module: str) -> Any:
    for pattern, value in (settings.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT does; patterns are plain names
            return value
    return settings[default]


def _left_out(settings: Mapping[str, Any], layer: int, module: str) -> str | None:
    """Return the list by which PEFT leaves out the module's weights, if one does."""
    lists = {key: settings.get(key) for key in ("exclude_modules", "target_modules")}
    for key, names in lists.items():  # regular expressions of users are never executed
        if isinstance(names, list) and names:
            is_named = any(f".{module}".endswith(f".{name}") for name in names)
            if is_named != (key == "target_modules"):
                return key
            if module in names:
                return None  # in whichever layer
    layers = settings.get("layers_to_transform")
    chosen = layers if isinstance(layers, list) else [layers]
    return None if layers in (None, []) or layer in chosen else "layers_to_transform"


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    if not file.is_file():
        hint = ""
        if file.with_suffix(".bin").exists():
            hint = "; adapter_model.bin is a pickle, which is never read: save as safetensors"
        raise AdapterError(f"{file}: is missing{hint}")
    try:
        with SafetensorsFile(file) as opened:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in opened.tensors.items()}
    except ModelError as error:
        raise AdapterError(str(error)) from error


def _match(
    file: Path,
    header: Mapping[str, tuple[tuple[int, ...], str]],
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int]],
    num_layers: int,
) -> tuple[LowRank, ...]:
    """Pair the matrices and check them; the weights determine the targets."""
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    problems = []
    for name, (_, dtype) in header.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in shapes:
            problems.append(f"{name[:160]} is not a LoRA matrix of a supported projection")
        elif int(match[1]) >= num_layers:
            problems.append(f"{name} is in layer {match[1]}; the model has {num_layers} layers")
        elif dtype not in _DTYPES:
            problems.append(f"{name} has unsupported dtype {dtype} (only {', '.join(_DTYPES)})")
        else:
            pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = name
    weights = []
    for (layer, target), names in sorted(pairs.items()):
        if set(names) != {"A", "B"}:
            problems.append(f"layer {layer} {target} has only one of lora_A and lora_B")
            continue
        module = names["A"].partition(".lora_")[0].removeprefix("base_model.model.")
        if key := _left_out(settings, layer, module):
            problems.append(f"{key} leaves out {module}, which has weights")
        part = _low_rank(settings, layer, target, module, names)
        outputs, inputs = shapes[target]
        for name, shape in (
            (part.a_name, (part.rank, inputs)),
            (part.b_name, (outputs, part.rank)),
        ):
            if header[name][0] != shape:
                problems.append(f"{name} is {list(header[name][0])}, not {list(shape)}")
        weights.append(part)
    targets = settings.get("target_modules")
    problems += [
        f"target_modules names {target!r}, which has no weights"
        for target in (targets if isinstance(targets, list) else ())
        if not any(part.target == str(target).rsplit(".", 1)[-1] for part in weights)
    ]
    if not weights and not problems:
        problems.append("contains no weights")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise AdapterError(f"{file}: {'; '.join(problems[:3])}{more}")
    return tuple(weights)


def _low_rank(
    settings: Mapping[str, Any], layer: int, target: str, module: str, names: Mapping[str, str]
) -> LowRank:
    rank = int(_by_module(settings, "rank_pattern", "r", module))
    alpha = float(_by_module(settings, "alpha_pattern", "lora_alpha", module))
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return LowRank(layer, target, rank, scale, names["A"], names["B"])
