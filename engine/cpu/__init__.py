"""The backend for CPUs; ``engine/cuda`` has the same files for GPUs."""
