"""LoRA adapters that come and go: vLLM's two calls."""

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import Body, NonEmpty


class LoadAdapterBody(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: NonEmpty
    lora_path: NonEmpty

    others = parameters.LOAD_ADAPTER


class UnloadAdapterBody(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: NonEmpty

    others = parameters.UNLOAD_ADAPTER
