"""What a model is made of: one file of data per family, RoPE, LoRA deltas, a layer's vectors.

No forward pass: that is ``baton/engine/cpu/decoder.py`` and ``baton/engine/cuda/decoder.py``.
"""
