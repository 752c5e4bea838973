"""Description of a model before loading: files, configuration, digests. No torch."""
