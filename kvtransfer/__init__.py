"""Moving KV cache between workers: places, digests, reservation and transfer machines."""
