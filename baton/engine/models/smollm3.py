"""SmolLM3: Llama without RoPE in each fourth layer, where Q and K are not rotated."""

from baton.engine.models import llama
from baton.engine.models.family import Family

FAMILY = Family(name="smollm3", layer_names=llama.LAYER_NAMES, gguf_pairs="adjacent")
