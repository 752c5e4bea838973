"""Keys of vLLM and older keys that the fleet file accepts as other spellings of its own.

A key with two spellings may have one value only.
"""

from collections.abc import Mapping
from typing import Any

OTHER_WORDS = {
    "max_model_len": "max_context_tokens",
    "max_num_seqs": "max_batch_requests",
    "max_num_batched_tokens": "max_step_tokens",
    "tensor_parallel_size": "pools.tensor_parallel",
    "quantization": "quantisation.weights",
    "enable_lora": "adapters.max_loaded",
    "max_loras": "adapters.max_loaded",
    "max_lora_rank": "adapters.max_rank",
    "log_dir": "logs.dir",
}
WITHOUT_MEANING = {
    "gpu_memory_utilization": "the KV pool takes the memory that is free. Set "
    "`kv_blocks_per_worker`, or with vLLM workers `--gpu-memory-utilization` in pools.vllm.args"
}


def own_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return the path of a key of the fleet file in Baton's spelling."""
    return (*OTHER_WORDS.get(str(path[0]), str(path[0])).split("."), *path[1:])


def respelled(keys: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of a section in Baton's spelling, by a table of other ones.

    Raises:
        ValueError: A key has two values.
    """
    result = dict(keys)
    for word, own in words.items():
        outer, _, inner = own.partition(".")
        section = result.get(outer, {}) if inner else {}
        if word not in keys or not isinstance(section, Mapping):
            continue
        value = result.pop(word)
        place = dict(section) if inner else result
        key = inner or outer
        if word == "enable_lora" and isinstance(value, bool):
            # Adapters are on unless their number is 0.
            value = 0 if not value else place.get(key) or (1 if key in place else None)
            if value is None:
                continue
        if place.setdefault(key, value) != value:
            raise ValueError(
                f"`{word}` ({keys[word]!r}) and `{own}` ({place[key]!r}) are one key with two "
                "values: remove one of them"
            )
        if inner:
            result[outer] = place
    return result
