"""What a model is, before anything is loaded: files, config, digests. No torch."""
