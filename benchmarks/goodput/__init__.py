"""Goodput of fleets with latency limits."""
