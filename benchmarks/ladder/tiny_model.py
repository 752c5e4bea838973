"""Small random Mistral on disk: real layers, tokenizer and template, at prompts of any length.

A window of 256 tokens keeps its attention linear: 131,072 tokens take half a second.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.model.artifact import ModelArtifact
from baton.text.tokenizer import load_tokenizer

_HIDDEN = 64
_FEED = 64
_HEADS = 2
_HEAD_DIM = 16
_WINDOW_TOKENS = 256
_SPREAD = 0.3  # of the weights: large enough that responses differ


def write_tiny_model(folder: Path, like: ModelArtifact, context_tokens: int) -> str:
    """Write the model, with tokenizer, template and end tokens of another one.

    Returns:
        Reference of the model.
    """
    config = like.config
    vocabulary = like.config.vocab_size
    width = _HEADS * _HEAD_DIM
    numbers = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _FEED,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context_tokens,
        "sliding_window": _WINDOW_TOKENS,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    layer = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (width, _HIDDEN),
        "self_attn.k_proj": (width, _HIDDEN),
        "self_attn.v_proj": (width, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, width),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_FEED, _HIDDEN),
        "mlp.up_proj": (_FEED, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _FEED),
    }
    shapes = {"model.embed_tokens": (vocabulary, _HIDDEN), "model.norm": (_HIDDEN,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * _SPREAD
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(numbers))
    tokenizer = load_tokenizer(like.tokenizer).backend
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    template = {"chat_template": like.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    save_file(weights, folder / "model.safetensors")
    return str(folder)
