"""The hand-off of KV: chunks, digests, both state machines, one file per transport. No torch."""
