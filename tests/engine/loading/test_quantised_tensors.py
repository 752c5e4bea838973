"""Quantised safetensors: every value is that of the format's own dequantisation.

compressed-tensors and transformers (fp8) pack and restore by themselves. AutoAWQ and GPTQModel
cannot be installed without a GPU, so their packing is written down here, value by value.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.loading.open import load_weights, open_weights
from baton.engine.models import llama
from baton.engine.models.rope import unpair_rows
from baton.model.artifact import ModelError, resolve_model
from tests.engine import tiny_models as tiny
from tests.engine.models.test_families import MAX_LOGIT_ERROR, error, logits_of

Tensors = dict[str, torch.Tensor]
Quantiser = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Function from a matrix to its stored parts and to its restored values."""
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
GROUP = 32


def write(folder: Path, config: dict[str, Any], quantise: Quantiser) -> Tensors:
    """Quantise the matrices of a tiny model; return what they are afterwards."""
    tiny.save(tiny.build("llama"), folder)
    stored = load_file(folder / "model.safetensors")
    restored = {}
    for i in range(3):
        for name in MATRICES:
            source = llama.LAYER_NAMES[name][1].format(i=i)
            parts, restored[f"layers.{i}.{name}"] = quantise(stored.pop(source))
            stem = source.removesuffix("weight")
            stored |= {f"{stem}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(described))
    return restored


def assert_restored(folder: Path, expected: Tensors, dtype: str = "fp32") -> None:
    artifact = resolve_model(str(folder))
    weights = load_weights(artifact, dtype)
    for name, values in expected.items():
        got = weights[name]
        whole = unpair_rows(got, 32) if name.endswith((".q", ".k")) else got
        assert torch.equal(whole, values.to(whole.dtype)), name
    # a rank reads rows of its own; here they begin and end within words and pieces
    with open_weights(artifact, dtype, rows=lambda name: slice(32, 96)) as some:
        for name in ("layers.1.q", "layers.2.up", "layers.0.gate"):
            assert torch.equal(some[name], weights[name][32:96])


# --- compressed-tensors ------------------------------------------------------------------------


def compressed(form: str, **args: Any) -> tuple[dict[str, Any], Quantiser]:
    # Each process of a test run would take a CPU second for these imports.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    is_float = weights.type == "float"
    most = 448.0 if is_float else 2.0 ** (weights.num_bits - 1) - 1

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        if weights.strategy == "tensor":
            groups = weight.view(1, 1, -1)
        elif weights.strategy == "block":
            groups = weight.view(rows // GROUP, GROUP, columns // GROUP, GROUP).transpose(1, 2)
            groups = groups.flatten(2)
        else:
            groups = weight.view(rows, 1 if weights.strategy == "channel" else columns // GROUP, -1)
        state: Tensors = {"weight": weight.clone()}
        if weights.symmetric:
            scale = groups.abs().amax(2) / most
        else:
            low, high = groups.amin(2), groups.amax(2)
            scale = (high - low) / 15
            state["weight_zero_point"] = ((-8 - low / scale).round().clamp(-8, 7)).to(torch.int8)
        state["weight_scale"] = scale.view(1) if weights.strategy == "tensor" else scale
        packed = compressor.compress(state, scheme)
        restored = compressor.decompress({**packed}, scheme)["weight"]
        return packed, restored

    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return config, quantise


COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8 by row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 by tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int4 by group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    "int4 by row": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": GROUP}),
    "fp8 by row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 by tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 by block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [GROUP, GROUP]},
    ),
}


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_are_restored_as_by_their_package(tmp_path: Path, case: str) -> None:
    form, args = COMPRESSED[case]
    assert_restored(tmp_path, write(tmp_path, *compressed(form, **args)))


# --- fp8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [[GROUP, GROUP], None], ids=["blocks", "tensor"])
def test_fp8_is_restored_as_by_transformers(tmp_path: Path, block: list[int] | None) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        blocks = weight.view(rows // height, height, columns // width, width)
        scale = blocks.abs().amax((1, 3)) / 448.0
        levels = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        restored = Fp8Dequantize(None)._dequantize_one(levels, scale, torch.float32)
        stored = scale if block else scale.view(())
        parts = {"weight": levels, "weight_scale_inv": stored}
        return {**parts, "activation_scale": torch.ones(())}, restored

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    expected = write(tmp_path, config, quantise)
    assert_restored(tmp_path, expected)
    assert_restored(tmp_path, expected, "bf16")
    assert resolve_model(str(tmp_path)).quantisation == "fp8"


# --- AWQ and GPTQ ------------------------------------------------------------------------------


def packed_rows(levels: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack ``[R, C]`` along C: value i of a word has the bits from ``i * bits`` on."""
    each = 32 // bits
    order = order or list(range(each))
    words = []
    for row in levels.tolist():
        for at in range(0, len(row), each):
            word = 0
            for place, index in enumerate(order):
                word |= int(row[at + index]) << (place * bits)
            words.append(word - (1 << 32) if word >> 31 else word)
    return torch.tensor(words, dtype=torch.int32).view(len(levels), -1)


def rounded(
    weight: torch.Tensor, bits: int, group_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels ``[N, K]``, zero points and scales ``[N, G]`` of a matrix."""
    count = int(group_K.max()) + 1
    zeros = torch.empty(len(weight), count)
    scales = torch.empty(len(weight), count)
    levels = torch.empty_like(weight)
    for g in range(count):
        part = weight[:, group_K == g]
        low = part.amin(1).clamp(max=0)
        scale = ((part.amax(1) - low) / (2**bits - 1)).half().float()
        zero = (-low / scale).round().clamp(1, 2**bits - 1)
        levels[:, group_K == g] = (
            (part / scale[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1)
        )
        zeros[:, g] = zero
        scales[:, g] = scale
    return levels, zeros, scales


def restored_from(
    levels: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_K: torch.Tensor
) -> torch.Tensor:
    return (levels - zeros[:, group_K]) * scales[:, group_K]


@pytest.mark.parametrize("group", [GROUP, -1])
def test_awq_is_restored(tmp_path: Path, group: int) -> None:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        group_K = torch.arange(inputs) // (inputs if group < 0 else group)
        levels, zeros, scales = rounded(weight, 4, group_K)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {
            "qweight": packed_rows(levels.T, 4, order),
            "qzeros": packed_rows(zeros.T, 4, order),
            "scales": scales.T.half(),
        }
        return parts, restored_from(levels, zeros, scales, group_K)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    assert_restored(tmp_path, write(tmp_path, {**config, "zero_point": True}, quantise))


@pytest.mark.parametrize(
    ("bits", "group", "form"),
    [(4, GROUP, "gptq"), (8, GROUP, "gptq"), (4, -1, "gptq_v2"), (4, 40, "gptq"), (2, 16, "gptq")],
)
def test_gptq_is_restored_in_the_order_of_activations(
    tmp_path: Path, bits: int, group: int, form: str
) -> None:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        group_K = torch.arange(inputs) // (inputs if group < 0 else group)
        is_ordered = group == GROUP
        if is_ordered:
            group_K = group_K[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        levels, zeros, scales = rounded(weight, bits, group_K)
        parts = {
            "qweight": packed_rows(levels, bits).T,
            "qzeros": packed_rows(zeros.T - (1 if form == "gptq" else 0), bits),
            "scales": scales.T.half(),
            "bias": torch.zeros(len(weight)),
        }
        if is_ordered:
            parts["g_idx"] = group_K.int()
        return parts, restored_from(levels, zeros, scales, group_K)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    assert_restored(tmp_path, write(tmp_path, {**config, "desc_act": True}, quantise))


# --- MXFP4 -------------------------------------------------------------------------------------


def test_experts_in_mxfp4_are_restored_as_by_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny.build("gpt_oss")
    tiny.save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(dense)
    save_file(stored, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    tokens = tiny.tokens(60)
    assert error(logits_of(tmp_path, tokens), model, tokens) < MAX_LOGIT_ERROR


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes' .*supported: awq, compr"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
        ({"quant_method": "gptq"}, "bits = 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "dynamic = "),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "block"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"format": "nvfp4-pack-quantized", "weights": {}}},
            },
            "format 'nvfp4-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": 1}}},
            "transform_config",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "format = 'sparse-24'",
        ),
    ],
)
def test_a_format_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    write(tmp_path, config, lambda weight: ({"weight": weight}, weight))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale", None, "has no scales"),
        ("weight_scale", torch.ones(3, 1), r"weight_scale \[3, 1\] of F32 does not fit"),
        ("weight_shape", torch.tensor([128, 10**6]), r"words for \[128, 1000000\]"),
        ("weight_g_idx", torch.full((64,), 9), "do not fit"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, part: str, value: torch.Tensor | None, message: str
) -> None:
    form, args = COMPRESSED["int4 by group"]
    write(tmp_path, *compressed(form, **args))
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.self_attn.q_proj.{part}"
    stored.pop(name, None)
    if value is not None:
        stored[name] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_weights(resolve_model(str(tmp_path)), "bf16")
