"""Where KV goes that the pool has no room for, and how it comes back: pure state machines."""
