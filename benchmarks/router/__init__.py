"""Throughput of a router for each second of CPU time, beside its peer."""
