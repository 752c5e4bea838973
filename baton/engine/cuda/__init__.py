"""The backend for GPUs; ``baton/engine/cpu`` has the same files for CPUs.

Neither imports the other.

Needs triton. The kernels are in ``kernels/``; under ``TRITON_INTERPRET=1`` they run on the CPU.
"""
