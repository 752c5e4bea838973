"""Model families (one file of data each), RoPE, LoRA deltas, and vectors of a layer.

The forward passes are ``baton/engine/cpu/decoder.py`` and ``baton/engine/cuda/decoder.py``.
"""
