"""KV tiers below the pool, as pure state machines: saving, restoring, eviction."""
