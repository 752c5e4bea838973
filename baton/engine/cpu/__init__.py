"""Backend for CPUs; ``baton/engine/cuda`` has the same files for GPUs. Neither imports the other.

``attention.py`` and ``linear.py`` use torch's kernels, ``native/`` our own; ``parallel/`` has the
ranks of a tensor-parallel replica.
"""
