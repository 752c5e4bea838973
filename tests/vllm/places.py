"""Where `make test-vllm` puts vLLM's environment and its model, and arguments for this CPU."""

from baton.folders import cache_root

PYTHON = cache_root() / "vllm/bin/python"
MODEL = cache_root() / "vllm-models/smol"
VISION_MODEL = cache_root() / "vllm-models/vision"
# On CPUs with AMX even vLLM alone does not answer "Paris" in bfloat16.
ARGS = (
    *("--dtype", "float32"),
    *("--block-size", "32"),
    "--enforce-eager",
    *("--kv-cache-memory-bytes", "536870912"),
)
