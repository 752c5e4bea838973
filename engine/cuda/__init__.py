"""The backend for GPUs; ``engine/cpu`` has the same files for CPUs. Needs triton."""
