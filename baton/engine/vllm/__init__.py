"""vLLM as the engine of a worker: a process between the worker's shell and ``vllm serve``."""
