"""Table of the keys of ``config.json``: honoured, without effect, or refused.

The table has every key that transformers reads for the supported families. Another key at the top
changes no logit of transformers either (tools that train models add their own), so it passes with a
warning in the log. An unknown key of RoPE is refused: such keys exist to change the angles.
"""

import logging
from collections.abc import Mapping
from typing import Any

from baton.model.model_config import ModelError

_LOG = logging.getLogger(__name__)

HONOURED = "honoured"
NO_EFFECT = "no effect"
Rule = str | tuple[Any, ...]
"""``HONOURED``, ``NO_EFFECT``, or the neutral values: the key is refused if it has another."""

_READ = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers head_dim
    num_attention_heads num_key_value_heads max_position_embeddings rms_norm_eps
    rope_theta rope_scaling rope_parameters rope_local_base_freq original_max_position_embeddings
    sliding_window use_sliding_window max_window_layers layer_types sliding_window_pattern
    _sliding_window_pattern query_pre_attn_scalar hidden_act hidden_activation
    no_rope_layers no_rope_layer_interval
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    tie_word_embeddings bos_token_id eos_token_id quantization_config text_config
"""
_IGNORED = """
    transformers_version torch_dtype dtype _name_or_path name_or_path _attn_implementation
    _attn_implementation_autoset attn_implementation auto_map use_cache cache_implementation
    initializer_range pretraining_tp attention_dropout attention_dropout_prob hidden_dropout
    resid_pdrop embd_pdrop attn_pdrop router_aux_loss_coef output_router_logits
    output_hidden_states output_attentions return_dict return_dict_in_generate
    use_return_dict chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention cross_attention_hidden_size problem_type id2label label2id num_labels
    finetuning_task task_specific_params tokenizer_class prefix pad_token_id sep_token_id
    decoder_start_token_id torchscript use_bfloat16 tf_legacy_loss pruned_heads tie_encoder_decoder
    gradient_checkpointing unsloth_version unsloth_fixed initial_context_length
    vision_config vision_feature_layer vision_start_token_id vision_end_token_id vision_token_id
    image_token_id image_token_index video_token_id boi_token_index eoi_token_index
    mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size
"""
_NEUTRAL: dict[str, Rule] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
CONFIG_KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(_READ.split(), HONOURED),
    **dict.fromkeys(_IGNORED.split(), NO_EFFECT),
    **_NEUTRAL,
}
MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
"""``model_type`` -> architecture, for files that do not name it."""
TEXT_TYPES: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
}
"""Architectures with images -> ``model_type`` of the decoder in them."""
FAMILY_KEYS: Mapping[str, Mapping[str, Rule]] = {}
"""Rules that differ for a family."""

_ROPE_READ = """
    rope_type type rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow truncate
    attention_factor attn_factor mscale mscale_all_dim original_max_position_embeddings
"""
# the sections of a position's three parts, which are equal in text
_ROPE_IGNORED = ("mrope_section", "mrope_interleaved", "finetuned")
ROPE_KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(_ROPE_READ.split(), HONOURED),
    **dict.fromkeys(_ROPE_IGNORED, NO_EFFECT),
    "partial_rotary_factor": (1.0,),
    "extrapolation_factor": (1.0,),
    "apply_yarn_scaling": (True,),
}
"""Keys of ``rope_scaling`` and ``rope_parameters``; another key is refused."""

_ORDER = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _defaults(*sizes: int | None, **more: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "default_theta": 10_000.0}
    return {**common, **dict(zip(_ORDER, sizes, strict=True)), **more}


_GEMMA3 = {
    "head_dim": 256,
    "default_theta": 1_000_000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE = {
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
}
_SMOLLM3 = {
    "default_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
_QWEN2_VL = {"rms_norm_eps": 1e-5, "default_theta": 1_000_000.0, "max_window_layers": 80}
_QWEN3_VL = {"head_dim": 128, "default_theta": 500_000.0}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _defaults(32_000, 4096, 11_008, 32, 32, None, 2048),
    "mistral": _defaults(32_000, 4096, 14_336, 32, 32, 8, 131_072, sliding_window=4096),
    "qwen2": _defaults(151_936, 4096, 22_016, 32, 32, 32, 32_768, **_QWEN),
    "qwen3": _defaults(151_936, 4096, 22_016, 32, 32, 32, 32_768, head_dim=128, **_QWEN),
    "qwen3_moe": _defaults(151_936, 2048, 6144, 24, 32, 4, 32_768, **_QWEN_MOE),
    "smollm3": _defaults(128_256, 2048, 11_008, 36, 16, 4, 32_768, **_SMOLLM3),
    "gemma3_text": _defaults(262_208, 2304, 9216, 26, 8, 4, 131_072, **_GEMMA3),
    "qwen2_5_vl_text": _defaults(
        152_064, 8192, 29_568, 80, 64, 8, 32_768, **{**_QWEN, **_QWEN2_VL}
    ),
    "qwen3_vl_text": _defaults(151_936, 4096, 22_016, 32, 32, 32, 128_000, **_QWEN3_VL),
}
"""Values of missing keys by ``model_type``: those of transformers."""


def refuse_keys(where: str, raw: Mapping[str, Any], family: str) -> None:
    """Raise ``ModelError`` for a key with a value that is not supported; warn of unknown keys."""
    rules = {**CONFIG_KEYS, **FAMILY_KEYS.get(family, {})}
    for key, value in raw.items():
        _refuse(where, key, value, rules.get(key, NO_EFFECT))
    if unknown := sorted(raw.keys() - rules.keys()):
        _LOG.warning("ignoring keys of config.json that transformers has not: %s", unknown[:20])


def refuse_rope_keys(where: str, rope: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` for a key of RoPE that is unknown or has an unsupported value."""
    for key, value in rope.items():
        if key not in ROPE_KEYS:
            raise ModelError(f"{where}: RoPE with {key} = {value!r} is not supported")
        _refuse(where, key, value, ROPE_KEYS[key])
    if rope.get("attn_factor") and rope.get("attention_factor"):
        raise ModelError(f"{where}: RoPE with both attn_factor and attention_factor is ambiguous")


def _refuse(where: str, key: str, value: Any, rule: Rule) -> None:
    if isinstance(rule, tuple) and value is not None and value not in rule:
        raise ModelError(f"{where}: {key} = {value!r} is not supported")
