"""Prefill worker: computes prompts and serves their KV."""
