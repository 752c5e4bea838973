"""Description of a model on disk, created without torch and before loading.

``baton/model/locate.py`` describes references and finds the files. Only metadata is read, until the
digest of the weights is needed.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from baton.model import gguf_config, hf_config
from baton.model.hf_config import read_json
from baton.model.hf_keys import refuse_values
from baton.model.hf_quantisation import Quantisation, read_quantisation
from baton.model.hf_tokens import TokenFiles
from baton.model.locate import HUB_LOAD_S, is_gguf, locate
from baton.model.model_config import ModelConfig, ModelError, refuse_numbers
from baton.model.safetensors_file import SafetensorsFile
from baton.model.token_keys import GENERATION_CONFIG, HINT, refuse_gguf_keys

__all__ = ["ModelArtifact", "ModelConfig", "ModelError", "TokenizerSource", "resolve_model"]

TokenizerSource = str | dict[str, Any]

# exceptions that a metadata value of the wrong type raises
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_CARD_CHARACTERS = 1 << 20
_COMMON = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_IN_GGUF = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
_GENERATION = {**dict(zip(_COMMON, _COMMON, strict=True)), "max_new_tokens": "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class ModelArtifact:
    """Model on this machine.

    Attributes:
        source: Reference as the user wrote it.
        path: GGUF file (any part of a split one), or directory of the safetensors files.
        architecture: Name in the artifact (``llama``, ``LlamaForCausalLM``).
        revision: Hub commit, or version of the package; ``None`` for plain files.
        quantisation: Format of most weights (``Q4_1``, ``BF16``).
        chat_template: Jinja text; None without one.
        tool_template: Jinja text for requests with tools, if the model has one.
        template_digest: 16 bytes over the chat templates; empty without one.
        weight_format: Format of quantised matrices in safetensors.
        tokenizer: Text of ``tokenizer.json``, or ``tokenizer.*`` metadata of a GGUF file.
        special_tokens: Text by name (``bos_token``) that the tokenizer's own files give; empty if
            the model has none of this name.
    """

    source: str
    path: Path
    format: Literal["gguf", "safetensors"]
    weight_files: tuple[Path, ...]
    architecture: str
    revision: str | None
    license: str | None
    quantisation: str
    config: ModelConfig
    chat_template: str | None
    tokenizer_digest: bytes
    template_digest: bytes
    generation_defaults: dict[str, float | int]
    weight_format: Quantisation | None = None
    tokenizer: TokenizerSource = field(repr=False, compare=False)
    tool_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)

    @cached_property
    def weights_digest(self) -> bytes:
        """16 bytes over the config and every byte of the weight files. The first access is slow."""
        return _digest_files(self.config, self.weight_files)


def resolve_model(
    reference: str,
    *,
    allow_unsupported: bool = False,
    hub_answers_s: float = HUB_LOAD_S,
    with_weights: bool = True,
) -> ModelArtifact:
    """Find a model and describe it; references are described in ``baton/model/locate.py``.

    With ``allow_unsupported`` also models that the engine cannot run (for tokenizers and tools).
    ``hub_answers_s`` is the time in seconds in which the hub must answer, if it is asked. Without
    ``with_weights`` a directory needs no weights, and none are read: the digest is of the config.

    Raises:
        ModelError: The model is missing, incomplete, or not supported.
        HubSilentError: The hub is needed, and has not answered in time.
    """
    path, revision = locate(reference, hub_answers_s=hub_answers_s, with_weights=with_weights)
    if not path.is_dir() and not is_gguf(path):
        raise ModelError(
            f"{path}: not a model; a .gguf file or a directory with config.json is needed"
        )
    check = not allow_unsupported
    try:
        if path.is_dir():
            return _from_directory(reference, path, revision, check=check, weights=with_weights)
        artifact = _from_gguf(reference, path, revision, check=check)
        return artifact if with_weights else replace(artifact, weight_files=())
    except ModelError:
        raise
    except _MALFORMED as error:
        why = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path}: invalid value in the metadata ({why})") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error


def _from_directory(
    source: str, folder: Path, revision: str | None, *, check: bool, weights: bool
) -> ModelArtifact:
    raw = read_json(folder / "config.json")
    if not raw:
        raise ModelError(f"{folder}: config.json is missing or empty")
    generation = read_json(folder / "generation_config.json")
    architecture = hf_config.architecture_of(raw)
    raw = hf_config.text_part(raw, architecture)
    if check:
        hf_config.refuse_unsupported(folder, architecture, raw)
        file = str(folder / "generation_config.json")
        refuse_values(file, generation, GENERATION_CONFIG, hint=HINT)
    config = hf_config.read_config(folder, raw, generation, architecture)
    form = read_quantisation(f"{folder}: architecture {architecture}", raw) if check else None
    files = _safetensors_files(folder) if weights else ()
    tokens = TokenFiles(folder, check=check)
    config = tokens.with_end(config)
    if check:
        refuse_numbers(str(folder / "config.json"), config)
    return ModelArtifact(
        source=source,
        path=folder,
        format="safetensors",
        weight_files=files,
        architecture=architecture,
        revision=revision,
        license=_license_of_card(folder / "README.md"),
        quantisation=_safetensors_dtype(files) if form is None else form.method,
        weight_format=form,
        config=config,
        tokenizer_digest=_digest(tokens.tokenizer),
        generation_defaults=_numbers(
            {
                name: generation[key]
                for key, name in _GENERATION.items()
                if generation.get(key) or (key == "temperature" and generation.get(key) == 0)
            }
        ),
        tokenizer=tokens.tokenizer,
        special_tokens=tokens.special,
        **_templates(tokens.templates),
    )


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and index.exists():  # one file goes before an index
        placed = read_json(index).get("weight_map")
        places: list[Any] = list(placed.values()) if isinstance(placed, dict) else [placed]
        if wrong := [name for name in places if Path(str(name)).name != name]:
            raise ModelError(f"{index}: names {wrong[0]!r}, which is not in this folder")
        names = sorted(set(places))
    files = tuple(folder / name for name in names)
    missing = [path.name for path in files if not path.is_file()]
    if not missing and files:
        return files
    hint = ""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        hint = "; pickled weights (.bin, .pt) are never read: convert them to safetensors"
    raise ModelError(f"{folder}: weight files missing: {', '.join(missing) or 'all'}{hint}")


def _safetensors_dtype(files: Iterable[Path]) -> str:
    counts: Counter[str] = Counter()
    for path in files:
        with SafetensorsFile(path) as file:
            for tensor in file.tensors.values():
                counts[tensor.dtype] += tensor.end - tensor.begin
    return counts.most_common(1)[0][0] if counts else "none"


def _templates(named: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the fields of the chat templates, which have names."""
    template = named.get("default")
    tools = named.get("tool_use")
    return {
        "chat_template": template,
        "tool_template": tools,
        "template_digest": b"" if template is None else _digest(template + (tools or "")),
    }


def _license_of_card(card: Path) -> str | None:
    if not card.is_file():
        return None
    with card.open(encoding="utf-8", errors="replace") as file:
        before, _, fields = file.read(_CARD_CHARACTERS).partition("---\n")
    fields = "" if before.strip() else fields.partition("\n---")[0]
    names = [line[8:] for line in fields.splitlines() if line.startswith("license:")]
    return names[0].strip().strip("'\"") or None if names else None


def _from_gguf(source: str, path: Path, revision: str | None, *, check: bool) -> ModelArtifact:
    from baton.model.gguf_file import READABLE, open_gguf

    try:
        reader = open_gguf(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as GGUF ({error})") from error
    meta = reader.metadata
    shapes = {t.name: t.shape for t in reader.tensors}
    elements: Counter[str] = Counter()
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if check and kind not in READABLE:
            raise ModelError(f"{path}: {tensor.name} is {kind.name}, which gguf cannot dequantise")
        elements[kind.name] += tensor.n_elements
    architecture = str(meta.get("general.architecture", "unknown"))
    if check:
        gguf_config.refuse_unsupported(path, architecture, meta)
        refuse_gguf_keys(str(path), meta)
    config = gguf_config.read_config(path, architecture, meta, shapes)
    if check:
        refuse_numbers(str(path), config)
    tokenizer = {k: v for k, v in meta.items() if k.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in tokenizer:
        raise ModelError(f"{path}: the tokenizer is missing (tokenizer.ggml.tokens)")
    key = "tokenizer.chat_template"
    templates = {"default": meta.get(key), "tool_use": meta.get(f"{key}.tool_use")}
    return ModelArtifact(
        source=source,
        path=path,
        format="gguf",
        weight_files=reader.paths,
        architecture=architecture,
        revision=revision,
        license=meta.get("general.license"),
        quantisation=elements.most_common(1)[0][0] if elements else "none",
        config=config,
        tokenizer_digest=_digest(json.dumps(tokenizer, sort_keys=True)),
        generation_defaults=_numbers(
            {
                name: meta[key]
                for kind, name in zip(_IN_GGUF, _COMMON, strict=True)
                if (key := f"general.sampling.{kind}") in meta
            }
        ),
        tokenizer=tokenizer,
        **_templates(templates),
    )


def _numbers(parameters: dict[str, Any]) -> dict[str, float | int]:
    for name, value in parameters.items():
        most = 1.0 if name in ("top_p", "min_p") else sys.float_info.max
        kinds = (int,) if name in ("top_k", "max_tokens") else (int, float)
        if type(value) not in kinds or not 0 <= value <= most:
            raise ValueError(f"{name} = {value!r}")
    return parameters


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest_files(config: ModelConfig, files: Iterable[Path]) -> bytes:
    """Digest the files and the config: other RoPE numbers with equal weights make other KV."""
    numbers = (
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rope_theta,
        sorted((config.rope_scaling or {}).items()),
        config.local_rope_theta,
        config.layer_windows,
        *((config.rope_layers,) if config.rope_layers else ()),
        config.query_scale,
        config.rms_norm_eps,
        config.experts_per_token,
        config.normalise_experts,
    )
    whole = hashlib.blake2b(repr(numbers).encode(), digest_size=16)
    buffer = bytearray(1 << 20)
    for path in files:
        whole.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                whole.update(memoryview(buffer)[:size])
    return whole.digest()
