"""Gemma 3, text only (of models with images the decoder).

Differences from Llama:

* a norm before *and* behind attention and feed-forward part ("sandwich");
* norms multiply with ``1 + w``; safetensors hold ``w``, GGUF ``1 + w``;
* Q and K are normed head by head; the query scale is a separate number, not ``1 / sqrt(D)``;
* the gate is GELU (tanh form); embeddings are multiplied with the square root of their width,
  in fp32 (transformers rounds that factor to the model's dtype);
* five layers with a sliding window and RoPE base 10,000, then one without a window, with base
  1,000,000 and, in the larger models, linear RoPE scaling.
"""

from baton.engine.models import llama, qwen3
from baton.engine.models.family import Family, Names

LAYER_NAMES: Names = {
    **llama.ATTENTION_NAMES,
    **qwen3.HEAD_NORM_NAMES,
    "attn_post_norm": (
        "blk.{i}.post_attention_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight",
    ),
    **llama.MLP_NAMES,
    "mlp_norm": ("blk.{i}.ffn_norm.weight", "model.layers.{i}.pre_feedforward_layernorm.weight"),
    "mlp_post_norm": (
        "blk.{i}.post_ffw_norm.weight",
        "model.layers.{i}.post_feedforward_layernorm.weight",
    ),
}

FAMILY = Family(
    name="gemma3",
    layer_names=LAYER_NAMES,
    activation="gelu_tanh",
    unit_norms=True,
    scale_embedding=True,
)
