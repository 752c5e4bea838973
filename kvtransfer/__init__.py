"""KV transfer: chunks, digests, both state machines, and one module per transport. No torch."""
