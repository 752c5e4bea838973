"""Tensor parallelism over the processes of one host."""
