"""Backend for GPUs; ``baton/engine/cpu`` has the same files for CPUs. Neither imports the other.

It needs triton. The kernels are in ``kernels/``; with ``TRITON_INTERPRET=1`` they run on the CPU.
"""
