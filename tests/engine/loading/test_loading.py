"""GGUF of every type, sharded safetensors, the cache, and refusals that name what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize
from safetensors.torch import save_file

from baton.engine.cpu.load import load_model
from baton.engine.loading.open import load_weights, open_weights
from baton.engine.models import llama
from baton.engine.models.rope import unpair_rows
from baton.engine.numerics import same_bits
from baton.model.artifact import ModelError, resolve_model
from baton.model.trust import check_trust
from baton.types.trust import TrustRules

HIDDEN, LAYERS, HEADS, KV, DIM, FEED, VOCAB = 256, 2, 4, 2, 64, 512, 320
SHAPES = {
    "attn_q": (HEADS * DIM, HIDDEN),
    "attn_k": (KV * DIM, HIDDEN),
    "attn_v": (KV * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM),
    "ffn_gate": (FEED, HIDDEN),
    "ffn_up": (FEED, HIDDEN),
    "ffn_down": (HIDDEN, FEED),
}
QUANTISED = sorted(_type_traits, key=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep converted weights in the test's folder."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


def write_gguf(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    change: Callable[[GGUFWriter], None] = lambda _: None,
    leave_out: tuple[str, ...] = (),
    part_tensors: int = 0,
) -> dict[str, np.ndarray]:
    """A tiny model; returns the raw data of its matrices."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    change(writer)
    block, size = GGML_QUANT_SIZES[kind]
    raw = {}

    def add(name: str, shape: tuple[int, ...], as_kind: GGMLQuantizationType) -> None:
        if name in leave_out:
            return
        if as_kind == GGMLQuantizationType.F32:
            raw[name] = (rng.standard_normal(shape) * 0.05).astype(np.float32)
            writer.add_tensor(name, raw[name])
            return
        data = rng.integers(0, 256, (shape[0], shape[1] // block * size), dtype=np.uint8)
        data &= 0xB7  # no scale is NaN or Inf, whichever bytes it has
        raw[name] = data
        writer.add_tensor(name, data, raw_dtype=as_kind)

    add("token_embd.weight", (VOCAB, HIDDEN), GGMLQuantizationType.F32)
    for i in range(LAYERS):
        for name, shape in SHAPES.items():
            add(f"blk.{i}.{name}.weight", shape, kind)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", (HIDDEN,), GGMLQuantizationType.F32)
    add("output_norm.weight", (HIDDEN,), GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises_is_loaded(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    raw = write_gguf(tmp_path / "tiny.gguf", kind)
    artifact = resolve_model(str(tmp_path / "tiny.gguf"))
    assert artifact.quantisation in {kind.name, "F32"}
    weights = load_weights(artifact, "fp32")
    for name, ours in (("attn_q", "q"), ("ffn_down", "down")):
        data = raw[f"blk.1.{name}.weight"]
        expected = torch.from_numpy(np.asarray(dequantize(data, kind), dtype=np.float32))
        got = weights[f"layers.1.{ours}"]
        assert got.shape == expected.shape
        assert torch.equal(got, expected)


def test_the_cache_is_used_and_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    artifact = resolve_model(str(tmp_path / "tiny.gguf"))
    stages: list[str] = []

    def load() -> dict[str, torch.Tensor]:
        stages.clear()
        return load_weights(
            artifact,
            "bf16",
            progress=lambda stage, done, total: stages.append(stage),
        )

    first = load()
    assert set(stages) == {"convert", "read"}
    again = load()
    assert set(stages) == {"read"}
    assert all(same_bits(first[name], again[name]) for name in first)

    (cached,) = (tmp_path / "weights").iterdir()
    data = bytearray(cached.read_bytes())
    data[-1000] ^= 1  # one bit
    cached.write_bytes(data)
    assert same_bits(load()["layers.1.down"], first["layers.1.down"])
    assert "convert" in stages

    cached.write_bytes(cached.read_bytes()[:5000])  # torn
    assert same_bits(load()["layers.1.down"], first["layers.1.down"])
    assert len(list((tmp_path / "weights").iterdir())) == 1  # nothing half-written stays


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    artifact = resolve_model(str(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("BATON_CACHE", str(blocked))
    assert "embed" in load_weights(artifact, "bf16")


def test_rows_are_the_same_with_a_cache_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    artifact = resolve_model(str(tmp_path / "tiny.gguf"))
    whole = load_weights(artifact, "bf16")
    wanted = {"layers.1.q": slice(64, 192), "layers.0.down": slice(250, 256), "embed": slice(0, 0)}

    def rows(name: str) -> slice:
        return wanted.get(name, slice(None))

    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for cache in (tmp_path, blocked):
        monkeypatch.setenv("BATON_CACHE", str(cache))
        with open_weights(artifact, "bf16", rows=rows) as weights:
            for name in whole:
                assert same_bits(weights.pop(name), whole[name][rows(name)])
            assert not weights


def test_a_split_file_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf", GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "m.gguf", GGMLQuantizationType.Q8_0, part_tensors=8)
    whole = load_weights(resolve_model(str(tmp_path / "one.gguf")), "bf16")
    for number in (1, 3):
        artifact = resolve_model(str(tmp_path / f"m-0000{number}-of-00003.gguf"))
        parts = load_weights(artifact, "bf16")
        assert all(same_bits(parts[name], whole[name]) for name in whole)
    with pytest.raises(ModelError, match="checks no split files"):
        check_trust(artifact, TrustRules(verify_key="key.pem", signature="m.sig"))
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "x-00001-of-00001.gguf")
    with pytest.raises(ModelError, match=r"No such file.*m-00002-of-00003\.gguf"):
        resolve_model(str(tmp_path / "m-00001-of-00003.gguf"))
    with pytest.raises(ModelError, match=r"have the names NAME-00001-of-00003\.gguf"):
        resolve_model(str(tmp_path / "x-00001-of-00001.gguf"))


def test_a_missing_weight_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", leave_out=("blk.1.ffn_up.weight",))
    artifact = resolve_model(str(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelError, match=r"llama.*blk\.1\.ffn_up\.weight is missing"):
        load_weights(artifact, "bf16")


def test_a_weight_that_the_family_does_not_know_is_named(tmp_path: Path) -> None:
    def bias(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(HEADS * DIM, dtype=np.float32))

    write_gguf(tmp_path / "tiny.gguf", change=bias)
    with pytest.raises(ModelError, match=r"not part of the family \(blk\.0\.attn_q\.bias\)"):
        load_weights(resolve_model(str(tmp_path / "tiny.gguf")), "bf16")


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="'fp8' is not supported"):
        load_weights(resolve_model(str(tmp_path / "tiny.gguf")), "fp8")


# --- safetensors -------------------------------------------------------------------------------


def write_directory(folder: Path, *, shards: int = 2, **changes: Any) -> dict[str, torch.Tensor]:
    """A tiny random Llama as Hugging Face stores it; returns its weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 200,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 3]}')
    artifact_config = {
        "q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64),
        "gate": (96, 64), "up": (96, 64), "down": (64, 96), "attn_norm": (64,), "mlp_norm": (64,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    weights = {
        "model.embed_tokens.weight": random((200, 64)),
        "lm_head.weight": random((200, 64)),
        "model.norm.weight": random((64,)) + 1,
    }
    for i in range(2):
        for name, (_, source) in llama.LAYER_NAMES.items():
            weights[source.format(i=i)] = random(artifact_config[name])
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        index = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: weights[name] for name in names[shard::shards]}
            save_file(part, folder / file)
            index.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    return weights


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_are_read_across_shards_with_rope_pairs_made_adjacent(
    tmp_path: Path, shards: int
) -> None:
    stored = write_directory(tmp_path / "model", shards=shards)
    artifact = resolve_model(str(tmp_path / "model"))
    weights = load_weights(artifact, "fp32")
    q = stored["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(weights["layers.1.q"][:2], q[[0, 8]])  # head 0: pair (0, dim / 2)
    assert torch.equal(unpair_rows(weights["layers.1.q"], 16), q)
    assert torch.equal(weights["layers.0.down"], stored["model.layers.0.mlp.down_proj.weight"])
    assert artifact.config.eos_token_ids == (2, 3)
    assert artifact.generation_defaults == {"temperature": 0.6}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["plain", "linear", "llama3"],
)
def test_a_directory_gives_the_logits_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    from tests.engine.models.test_against_transformers import logits_of

    transformers = pytest.importorskip("transformers")
    write_directory(tmp_path / "model", **rope)
    artifact = resolve_model(str(tmp_path / "model"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = [(37 * i + 5) % 200 for i in range(120)]
    with torch.inference_mode():
        model = load_model(artifact, "fp32", "fast")
        expected = theirs(torch.tensor([tokens])).logits[0]
        assert torch.allclose(logits_of(model, artifact, tokens), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
    ],
)
def test_what_the_family_cannot_do_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_directory(tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path / "model"))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    write_directory(tmp_path / "model", shards=1)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights"):
        resolve_model(str(tmp_path / "model"))


def test_a_damaged_safetensors_file_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path / "model", shards=1)
    file = tmp_path / "model" / "model.safetensors"
    artifact = resolve_model(str(tmp_path / "model"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_weights(artifact, "bf16")
