"""The backend for CPUs; ``engine/cuda`` has the same files for GPUs. Neither imports the other.

``attention.py`` and ``linear.py`` are torch's kernels, ``native/`` our own, ``parallel/`` the ranks.
"""
