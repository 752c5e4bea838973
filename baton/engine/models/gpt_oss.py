"""gpt-oss: a mixture of experts, with biases everywhere and a sink in each head of attention.

A sink is a score that takes weight from the keys and has no value. Windows alternate. The gate is
clamped. Published files have experts in MXFP4 (``baton/engine/loading/quantised_tensor.py``).
GGUF files are not supported.
"""

from baton.engine.models import llama, qwen2
from baton.engine.models.family import Family, Names

_ATTENTION = "model.layers.{i}.self_attn"
_EXPERTS = "model.layers.{i}.mlp.experts"
_ROUTER = "model.layers.{i}.mlp.router"

LAYER_NAMES: Names = {
    **llama.ATTENTION_NAMES,
    **{name: qwen2.LAYER_NAMES[name] for name in ("q_bias", "k_bias", "v_bias")},
    "o_bias": ("", f"{_ATTENTION}.o_proj.bias"),
    "sinks": ("", f"{_ATTENTION}.sinks"),
    "mlp_norm": llama.MLP_NAMES["mlp_norm"],
    "router": ("", f"{_ROUTER}.weight"),
    "router_bias": ("", f"{_ROUTER}.bias"),
    "experts.{j}.gate_up": ("", f"{_EXPERTS}.gate_up_proj"),
    "experts.{j}.gate_up_bias": ("", f"{_EXPERTS}.gate_up_proj_bias"),
    "experts.{j}.down": ("", f"{_EXPERTS}.down_proj"),
    "experts.{j}.down_bias": ("", f"{_EXPERTS}.down_proj_bias"),
}

FAMILY = Family(
    name="gpt_oss",
    layer_names=LAYER_NAMES,
    activation="swiglu_clamped",
    joined_experts=True,
)
