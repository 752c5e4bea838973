"""Audit log: a chain of hashed lines in a file, and the way of other hosts' entries to it."""
