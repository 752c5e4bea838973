"""Keys of tokenizer files: one table per file, of honoured, ignored and refused keys.

Only keys that change a text, an id or an end of an answer matter here. ``hf_tokens.py`` and
``gguf_tokens.py`` read the honoured ones. Keys of ``tokenizer.json`` are those of the package
`tokenizers`, which refuses others; ``truncation``, ``padding`` and ``dropout`` have no effect.
"""

from collections.abc import Mapping
from typing import Any

from baton.model.hf_keys import HONOURED, NO_EFFECT, Rule, refuse_values
from baton.model.model_config import ModelError

HINT = "; remove the key to serve"
_OFF: tuple[Any, ...] = (False, 0, [], {})


def _rules(honoured: str, no_effect: str, refused: str, **others: Rule) -> dict[str, Rule]:
    rules: dict[str, Rule] = dict.fromkeys(honoured.split(), HONOURED)
    rules |= dict.fromkeys(no_effect.split(), NO_EFFECT)
    return {**rules, **dict.fromkeys(refused.split(), _OFF), **others}


TOKENIZER_CONFIG: Mapping[str, Rule] = _rules(
    """
    bos_token eos_token unk_token sep_token pad_token cls_token mask_token added_tokens_decoder
    additional_special_tokens extra_special_tokens fix_mistral_regex chat_template
    add_prefix_space tokenizer_class
    """,
    # transformers takes add_bos_token from tokenizer.json; vLLM does not clean up spaces either
    """
    auto_map processor_class backend is_local model_max_length model_input_names
    padding_side truncation_side add_bos_token add_eos_token legacy errors
    use_default_system_prompt sp_model_kwargs spaces_between_special_tokens device_map
    clean_up_tokenization_spaces max_length stride truncation_strategy pad_to_multiple_of
    """,
    "split_special_tokens",
)
"""Keys of ``tokenizer_config.json``. Other names of tokens (``image_token``) are honoured."""

GENERATION_CONFIG: Mapping[str, Rule] = _rules(
    "eos_token_id temperature top_k top_p min_p repetition_penalty max_new_tokens",
    # a request says whether to sample; these choose speed, what is returned, or options of beams
    """
    do_sample num_return_sequences early_stopping length_penalty
    diversity_penalty max_length low_memory use_mtp use_cache
    cache_implementation cache_config max_cache_len output_attentions output_hidden_states
    output_scores output_logits return_dict_in_generate pad_token_id bos_token_id
    decoder_start_token_id is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight prompt_lookup_num_tokens max_matching_ngram_size speculation_type
    compile_config disable_compile continuous_batching_config prefill_chunk_size
    transformers_version renormalize_logits remove_invalid_values
    """,
    """
    min_length min_new_tokens no_repeat_ngram_size epsilon_cutoff eta_cutoff suppress_tokens
    begin_suppress_tokens bad_words_ids forced_bos_token_id forced_eos_token_id force_words_ids
    constraints sequence_bias exponential_decay_length_penalty stop_strings token_healing
    watermarking_config penalty_alpha dola_layers max_time encoder_no_repeat_ngram_size
    """,
    **dict.fromkeys(
        ("typical_p", "top_h", "guidance_scale", "encoder_repetition_penalty"), (*_OFF, 1.0)
    ),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (*_OFF, 1)),
)
"""Keys of ``generation_config.json``."""

_GGUF = _rules(
    """
    model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id
    fim_pad_token_id fim_rep_token_id fim_sep_token_id unknown_token_id add_bos_token
    add_eos_token add_space_prefix
    """,
    # other algorithms than the two that are supported use some of these
    "token_type_count add_sep_token remove_extra_whitespaces precompiled_charsmap "
    "normalizer.lowercase normalizer.strip_accents",
    "suppress_tokens",
)
_GGUF_SAMPLING = _rules(
    "temp top_k top_p min_p penalty_repeat",
    "sequence penalty_last_n xtc_threshold mirostat_tau mirostat_eta",
    "xtc_probability mirostat",
)
GGUF: Mapping[str, Rule] = {
    **{f"tokenizer.ggml.{key}": rule for key, rule in _GGUF.items()},
    **{f"general.sampling.{key}": rule for key, rule in _GGUF_SAMPLING.items()},
}
"""Keys of GGUF metadata, beside templates. Another ``tokenizer.ggml`` but a token is refused."""


def refuse_gguf_keys(where: str, metadata: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` for a key about tokens that is unknown or has an unsupported value."""
    refuse_values(where, metadata, GGUF, hint=HINT)
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key not in GGUF and not key.endswith("_token_id"):
            raise ModelError(f"{where}: the key {key} is not supported")
