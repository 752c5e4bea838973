"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer.

A router assigns each token a probability per expert. The experts with the highest probabilities
compute the token, and their results are summed with these weights, which ``norm_topk_prob`` makes
add up to one. Hugging Face files have a weight for each expert, GGUF one tensor for all. Models
with dense layers in between (``mlp_only_layers``, ``decoder_sparse_step``) are rejected.
"""

from baton.engine.models import llama, qwen3
from baton.engine.models.family import Family, Names

EXPERT_NAMES: Names = {
    "mlp_norm": llama.MLP_NAMES["mlp_norm"],
    "router": ("blk.{i}.ffn_gate_inp.weight", "model.layers.{i}.mlp.gate.weight"),
    "experts.{j}.gate": (
        "blk.{i}.ffn_gate_exps.weight",
        "model.layers.{i}.mlp.experts.{j}.gate_proj.weight",
    ),
    "experts.{j}.up": (
        "blk.{i}.ffn_up_exps.weight",
        "model.layers.{i}.mlp.experts.{j}.up_proj.weight",
    ),
    "experts.{j}.down": (
        "blk.{i}.ffn_down_exps.weight",
        "model.layers.{i}.mlp.experts.{j}.down_proj.weight",
    ),
}

FAMILY = Family(
    name="qwen3_moe",
    layer_names={**llama.ATTENTION_NAMES, **qwen3.HEAD_NORM_NAMES, **EXPERT_NAMES},
)
