"""Triton kernels for CUDA; importing this package imports neither torch nor triton."""
