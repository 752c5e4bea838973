"""Bodies of vLLM's two calls that load and unload LoRA adapters."""

from typing import ClassVar

from router.frontend.api.bodies.common import Body, NonEmpty
from router.frontend.api.bodies.fields import Refused


class LoadAdapterBody(Body):
    """Request body of ``POST /v1/load_lora_adapter``."""

    lora_name: NonEmpty
    """model name of the adapter"""
    lora_path: NonEmpty
    """the adapter's directory"""
    base_model: str | None = None
    """name of the model that the adapter changes; required if the fleet serves several models"""

    refused: ClassVar[dict[str, Refused]] = {
        "load_inplace": Refused((None, False), "unload it first")
    }


class UnloadAdapterBody(Body):
    """Request body of ``POST /v1/unload_lora_adapter``."""

    lora_name: NonEmpty
    """model name of the adapter"""

    accepted: ClassVar[dict[str, str]] = {"lora_int_id": "the adapter is identified by its name"}
