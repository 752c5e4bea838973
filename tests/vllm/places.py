"""Where `make test-vllm` puts vLLM's environment and its model, and arguments for this CPU."""

from baton.model.locate import cache_root

PYTHON = cache_root() / "vllm/bin/python"
MODEL = cache_root() / "vllm-models/smol"
ARGS = (
    *("--dtype", "bfloat16"),
    *("--block-size", "32"),
    "--enforce-eager",
    *("--kv-cache-memory-bytes", "536870912"),
)
