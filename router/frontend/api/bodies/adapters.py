"""LoRA adapters that come and go: vLLM's two calls."""

from router.frontend.api.bodies.common import Body, NonEmpty
from router.frontend.api.bodies.fields import Fields, Refused


class LoadAdapterBody(Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: NonEmpty
    """the name of a model"""
    lora_path: NonEmpty
    """a directory"""

    others = Fields(
        refused={"load_inplace": Refused((None, False), "unload it first")},
    )


class UnloadAdapterBody(Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: NonEmpty
    """the name of a model"""

    others = Fields(
        accepted={"lora_int_id": "the name says which"},
    )
