"""Bodies of vLLM's two calls that load and unload LoRA adapters."""

from router.frontend.api.bodies.common import Body, NonEmpty
from router.frontend.api.bodies.fields import Fields, Refused


class LoadAdapterBody(Body):
    """Request body of ``POST /v1/load_lora_adapter``."""

    lora_name: NonEmpty
    """model name of the adapter"""
    lora_path: NonEmpty
    """the adapter's directory"""

    others = Fields(
        refused={"load_inplace": Refused((None, False), "unload it first")},
    )


class UnloadAdapterBody(Body):
    """Request body of ``POST /v1/unload_lora_adapter``."""

    lora_name: NonEmpty
    """model name of the adapter"""

    others = Fields(
        accepted={"lora_int_id": "the adapter is identified by its name"},
    )
