"""The CUDA path against the limits of a GPU: `python3 -m benchmarks.gpu`."""
