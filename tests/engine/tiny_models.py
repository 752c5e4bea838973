"""Tiny random models of every family: by transformers as safetensors, and rewritten as GGUF.

The GGUF writer follows llama.cpp's `convert_hf_to_gguf.py` and takes tensor names from the `gguf`
package's own map, so that our tables are checked against theirs.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

WINDOW = 24
VOCAB = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layer_interval": 2},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-not-normed": ("Qwen3Moe", EXPERTS),
}


def build(name: str, **changes: Any) -> Any:
    """A model of `transformers`, fp32, with weights that hide nothing: norms and biases too."""
    prefix, own = MODELS[name]
    kind = "Gemma3Text" if prefix == "Gemma3" else prefix
    values = {**COMMON, **own, **changes}
    if prefix in ("Qwen2", "SmolLM3"):
        values["hidden_size"] = 128  # they have no head_dim of their own
    config = getattr(transformers, f"{kind}Config")(**values)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    return filled(model, unit_norms=prefix == "Gemma3")


def filled(model: Any, *, unit_norms: bool) -> Any:
    """Fill a model with random weights; ``unit_norms`` are added to 1 by the model."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0.0, 0.15, generator=generator)
            if key.endswith("norm.weight") and not unit_norms:
                weight += 1.0
    return model


def save(model: Any, folder: Path) -> Path:
    """As a Hugging Face directory; the tokenizer is not looked at."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tokens(count: int) -> list[int]:
    return [(7919 * i * i + 13 * i + 5) % VOCAB for i in range(count)]


# --- GGUF --------------------------------------------------------------------------------------

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
_ADJACENT = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3)


def save_gguf(model: Any, path: Path, *, divisors: np.ndarray | None = None) -> Path:
    """As llama.cpp's converter would; ``divisors`` are its form of llama3 scaling."""
    config = model.config
    arch = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_numbers(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, weight in _merged_experts(model.state_dict(), config).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"gguf has no name for {key}")
        if arch is gguf.MODEL_ARCH.GEMMA3 and key.endswith("norm.weight"):
            weight = weight + 1
        if arch in _ADJACENT and key.endswith(("q_proj.weight", "k_proj.weight")):
            count = config.num_attention_heads if ".q_proj" in key else config.num_key_value_heads
            halves = weight.reshape(count, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, np.ascontiguousarray(weight))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merged_experts(state: dict[str, torch.Tensor], config: Any) -> dict[str, np.ndarray]:
    """transformers holds gate and up of all experts in one, GGUF in two."""
    out = {}
    for key, tensor in state.items():
        weight = tensor.numpy()
        if config.model_type == "gpt_oss" and ".experts." in key:
            weight = weight.swapaxes(1, -1)  # outputs first; a bias has no inputs
            stem, _, kind = key.rpartition(".")
            kind = f"{kind}.weight".replace("_bias.weight", ".bias")
            if kind.startswith("down"):
                out[f"{stem}.{kind}"] = weight
                continue
            out[f"{stem}.{kind.replace('gate_up', 'gate')}"] = weight[:, ::2]
            out[f"{stem}.{kind.replace('gate_up', 'up')}"] = weight[:, 1::2]
        elif key.endswith("sinks"):
            out[f"{key}.weight"] = weight
        elif key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            f = config.moe_intermediate_size
            out[f"{stem}gate_proj.weight"] = weight[:, :f]
            out[f"{stem}up_proj.weight"] = weight[:, f:]
        elif key.endswith("experts.down_proj"):
            out[f"{key}.weight"] = weight
        else:
            out[key] = weight
    return out


def _write_numbers(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("qwen3_moe", "gpt_oss"):
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
