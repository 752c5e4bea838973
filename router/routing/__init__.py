"""Life of a request without HTTP: admission, placement, streams to workers, shares, records."""
