"""CUDA path beside the limits of a GPU: `python3 -m benchmarks.gpu`."""
