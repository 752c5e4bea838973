"""Tensor parallelism over processes of one or several hosts."""
