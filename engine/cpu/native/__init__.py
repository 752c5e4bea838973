"""Kernels of our own in C++, compiled on the machine that runs them; see ``library.py``."""
