"""Qwen3: Llama with an RMS norm over each head of Q and K before RoPE; no biases.

The width of a head is configured: heads times width need not be the hidden size.
"""

from baton.engine.models import llama
from baton.engine.models.family import Family, Names

HEAD_NORM_NAMES: Names = {
    "q_norm": ("blk.{i}.attn_q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    "k_norm": ("blk.{i}.attn_k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
}
LAYER_NAMES: Names = {**llama.LAYER_NAMES, **HEAD_NORM_NAMES}

FAMILY = Family(name="qwen3", layer_names=LAYER_NAMES)
