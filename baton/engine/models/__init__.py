"""What a model is made of: one file of data per family, RoPE, LoRA deltas, a layer's vectors.

No forward pass: that is ``engine/cpu/decoder.py`` and ``engine/cuda/decoder.py``.
"""
