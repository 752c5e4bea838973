"""gpt-oss: a mixture of experts, with biases everywhere and a sink in each head of attention.

A sink is a score that takes weight from the keys and has no value. Windows alternate. The gate is
clamped. Published files have experts in MXFP4 (``baton/engine/loading/quantised_tensor.py``).
"""

from baton.engine.models import llama, qwen2
from baton.engine.models.family import Family, Names

_HF = "model.layers.{i}"
_GATE_UP = f"{_HF}.mlp.experts.gate_up_proj"
_DOWN = f"{_HF}.mlp.experts.down_proj"

LAYER_NAMES: Names = {
    **llama.ATTENTION_NAMES,
    **{name: qwen2.LAYER_NAMES[name] for name in ("q_bias", "k_bias", "v_bias")},
    "o_bias": ("blk.{i}.attn_output.bias", f"{_HF}.self_attn.o_proj.bias"),
    "sinks": ("blk.{i}.attn_sinks.weight", f"{_HF}.self_attn.sinks"),
    "mlp_norm": ("blk.{i}.post_attention_norm.weight", llama.MLP_NAMES["mlp_norm"][1]),
    "router": ("blk.{i}.ffn_gate_inp.weight", f"{_HF}.mlp.router.weight"),
    "router_bias": ("blk.{i}.ffn_gate_inp.bias", f"{_HF}.mlp.router.bias"),
    "experts.{j}.gate": ("blk.{i}.ffn_gate_exps.weight", _GATE_UP),
    "experts.{j}.up": ("blk.{i}.ffn_up_exps.weight", _GATE_UP),
    "experts.{j}.gate_bias": ("blk.{i}.ffn_gate_exps.bias", f"{_GATE_UP}_bias"),
    "experts.{j}.up_bias": ("blk.{i}.ffn_up_exps.bias", f"{_GATE_UP}_bias"),
    "experts.{j}.down": ("blk.{i}.ffn_down_exps.weight", _DOWN),
    "experts.{j}.down_bias": ("blk.{i}.ffn_down_exps.bias", f"{_DOWN}_bias"),
}

FAMILY = Family(
    name="gpt_oss",
    layer_names=LAYER_NAMES,
    activation="swiglu_clamped",
    joined_experts=True,
)
