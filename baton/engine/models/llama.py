"""Llama 2 and 3, and models of the same design (SmolLM2, TinyLlama, Yi ...): the plain decoder.

RMS norm, attention with RoPE and shared KV heads, a SiLU gate; no biases, no windows. The other
families are described as differences from it. Llama 3.1 scales RoPE (``llama3``): Hugging Face
configures it in ``rope_scaling``, GGUF stores the divisors as a tensor.
"""

from baton.engine.models.family import Family, Names

ATTENTION_NAMES: Names = {
    "attn_norm": ("blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    "q": ("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    "k": ("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    "v": ("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    "o": ("blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"),
}
MLP_NAMES: Names = {
    "mlp_norm": ("blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    "gate": ("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    "up": ("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "down": ("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
}
LAYER_NAMES: Names = {**ATTENTION_NAMES, **MLP_NAMES}

FAMILY = Family(name="llama", layer_names=LAYER_NAMES, gguf_pairs="adjacent")
