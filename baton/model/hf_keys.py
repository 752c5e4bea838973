"""Table of the keys of ``config.json``: honoured, without effect, or refused.

The table has every key that transformers reads for the supported families. Another key at the top
changes no logit of transformers either (tools that train models add their own), so it passes with a
warning in the log. An unknown key of RoPE is refused: such keys exist to change the angles.
"""

import json
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
    query_pre_attn_scalar hidden_act hidden_activation
    no_rope_layers no_rope_layer_interval num_experts num_local_experts num_experts_per_tok
    moe_intermediate_size norm_topk_prob tie_word_embeddings bos_token_id eos_token_id
    quantization_config text_config
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
    gradient_checkpointing experts_per_token unsloth_version unsloth_fixed initial_context_length
    vision_config vision_feature_layer vision_start_token_id vision_end_token_id vision_token_id
    image_token_id image_token_index video_token_id boi_token_index eoi_token_index
    mm_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size
    _sliding_window_pattern
"""
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping")
_SWITCHED_OFF = ("attention_bias", "mlp_bias", "use_bidirectional_attention")
CONFIG_KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(_READ.split(), HONOURED),
    **dict.fromkeys(_IGNORED.split(), NO_EFFECT),
    **dict.fromkeys(_UNSUPPORTED, (None,)),
    **dict.fromkeys(_SWITCHED_OFF, (False,)),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),
    "is_causal": (True,),
    "mlp_only_layers": ([],),
}
FAMILY_KEYS: Mapping[str, Mapping[str, Rule]] = {
    "gpt_oss": {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
}
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

_DEFAULTS = """
    llama max_position_embeddings=2048
    mistral max_position_embeddings=131072 num_key_value_heads=8 sliding_window=4096
    qwen2 max_position_embeddings=32768 num_key_value_heads=32 sliding_window=4096
        max_window_layers=28
    qwen3 max_position_embeddings=32768 num_key_value_heads=32 sliding_window=4096
        max_window_layers=28 head_dim=128
    qwen3_moe max_position_embeddings=32768 num_key_value_heads=4 sliding_window=4096
        moe_intermediate_size=768 num_local_experts=128 num_experts_per_tok=8
    smollm3 max_position_embeddings=32768 num_key_value_heads=4 no_rope_layer_interval=4
        default_theta=2000000 tie_word_embeddings=true
    gpt_oss max_position_embeddings=131072 num_key_value_heads=8 sliding_window=128 head_dim=64
        num_local_experts=128 num_experts_per_tok=4 default_theta=150000 rms_norm_eps=1e-5
    gemma3_text max_position_embeddings=131072 num_key_value_heads=4 sliding_window=4096
        num_attention_heads=8 head_dim=256 vocab_size=262208 default_theta=1000000
        query_pre_attn_scalar=256 tie_word_embeddings=true
    qwen2_5_vl_text max_position_embeddings=32768 num_key_value_heads=8 sliding_window=4096
        max_window_layers=80 default_theta=1000000 rms_norm_eps=1e-5
    qwen3_vl_text max_position_embeddings=128000 num_key_value_heads=32 head_dim=128
        default_theta=500000
"""


def _read_defaults(table: str) -> dict[str, dict[str, Any]]:
    defaults: dict[str, dict[str, Any]] = {}
    for word in table.split():
        key, _, value = word.partition("=")
        if not value:
            own = defaults[key] = {"rms_norm_eps": 1e-6, "default_theta": 10_000}
        else:
            own[key] = json.loads(value)
    return defaults


DEFAULTS: Mapping[str, Mapping[str, Any]] = _read_defaults(_DEFAULTS)
"""Values of missing keys by ``model_type``: those of transformers. Sizes have none."""


def refuse_values(
    where: str,
    raw: Mapping[str, Any],
    rules: Mapping[str, Rule],
    others: Rule = NO_EFFECT,
    hint: str = "",
) -> None:
    """Raise ``ModelError`` for a key whose value is not supported; ``others`` is the other rule."""
    for key, value in raw.items():
        rule = rules.get(key, others)
        if isinstance(rule, tuple) and value is not None and value not in rule:
            raise ModelError(f"{where}: {key} = {value!r:.80} is not supported{hint}")


def refuse_keys(where: str, raw: Mapping[str, Any], family: str) -> None:
    """Raise ``ModelError`` for a key with a value that is not supported; warn of unknown keys."""
    rules = {**CONFIG_KEYS, **FAMILY_KEYS.get(family, {})}
    refuse_values(where, raw, rules)
    if unknown := sorted(raw.keys() - rules.keys()):
        _LOG.warning("ignoring keys of config.json that transformers has not: %s", unknown[:20])


def refuse_rope_keys(where: str, rope: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` for a key of RoPE that is unknown or has an unsupported value."""
    refuse_values(f"{where}: RoPE", rope, ROPE_KEYS, others=())
    if rope.get("attn_factor") and rope.get("attention_factor"):
        raise ModelError(f"{where}: RoPE with both attn_factor and attention_factor is ambiguous")
