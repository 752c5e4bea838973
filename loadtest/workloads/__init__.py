"""Workloads: trace files, arrivals, prompts, sessions. Sends nothing; only reads files."""
