"""Benches, and what measures a fleet from outside."""
