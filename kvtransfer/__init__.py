"""The hand-off of KV: chunks, digests, both state machines, one file for each transport. No torch."""
