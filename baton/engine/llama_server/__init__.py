"""Engine of attached llama-servers."""
