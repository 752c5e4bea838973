"""Mistral: Llama's weights, with a sliding window in every layer of the first version (7B v0.1).

The window comes from ``sliding_window`` of ``config.json``; later versions have none. llama.cpp
stores Mistral as architecture ``llama`` without a window; such files use
``baton/engine/models/llama.py``.
"""

from baton.engine.models import llama
from baton.engine.models.family import Family

FAMILY = Family(name="mistral", layer_names=llama.LAYER_NAMES, gguf_pairs="adjacent")
