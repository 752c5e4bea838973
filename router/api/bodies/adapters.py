"""LoRA adapters that come and go: vLLM's two calls."""

from typing import ClassVar

from router.api.bodies.common import Body, Neutral, NonEmpty, only


class LoadAdapterBody(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: NonEmpty
    lora_path: NonEmpty

    neutral: ClassVar[Neutral] = {"load_inplace": only(None, False)}


class UnloadAdapterBody(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: NonEmpty

    neutral: ClassVar[Neutral] = {"lora_int_id": only(None)}
