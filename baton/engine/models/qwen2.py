"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V.

With ``use_sliding_window`` the layers from ``max_window_layers`` on have a window; published models
do not use it. Long contexts use RoPE scaling ``yarn``.
"""

from baton.engine.models import llama
from baton.engine.models.family import Family, Names

LAYER_NAMES: Names = {
    **llama.LAYER_NAMES,
    "q_bias": ("blk.{i}.attn_q.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    "k_bias": ("blk.{i}.attn_k.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    "v_bias": ("blk.{i}.attn_v.bias", "model.layers.{i}.self_attn.v_proj.bias"),
}

FAMILY = Family(name="qwen2", layer_names=LAYER_NAMES)
