"""A small random Llama on disk, as Hugging Face stores it: real code paths, no time."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 512
HIDDEN = 80
FEED = 112
HEAD_DIM = 32
LAYERS = 2


def write_llama(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 1,
    context_tokens: int = 1024,
    vocab_size: int = VOCAB,
) -> str:
    """Write the model; returns the reference to load it by."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": FEED,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_tokens,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (heads * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FEED, HIDDEN),
        "mlp.up_proj": (FEED, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED),
    }
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "lm_head.weight": random(vocab_size, HIDDEN),
        "model.norm.weight": random(HIDDEN) + 1,
    }
    for i in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = random(*shape)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(weights, folder / "model.safetensors")
    return str(folder)
