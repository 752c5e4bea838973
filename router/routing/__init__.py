"""A request's life, without HTTP: admission, placement, streams to workers, shares, records."""
