"""What answers promise, and in which order products are summed."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator


class NumericsConfig(BaseModel):
    """`exact`, `fast`, or a mapping with `mode` and `native`.

    Attributes:
        mode: ``exact``: the same request gives the same tokens on every path; ``fast`` promises
            nothing.
        native: The order in which the kernels for CPUs sum (``docs/design/engine.md``): workers
            pair in ``exact`` only if their order is the same. ``auto`` is the fastest order of each
            host, so a fleet of mixed CPUs sets ``tile`` or ``vdp``; ``off`` leaves it to torch.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    mode: Literal["exact", "fast"] = "exact"
    native: Literal["auto", "tile", "vdp", "off"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_the_mode(cls, value: object) -> object:
        if value in ("exact", "fast"):
            return {"mode": value}
        if isinstance(value, dict) and value.get("native") is False:  # YAML's bare `off`
            return {**value, "native": "off"}
        if not isinstance(value, dict | NumericsConfig):
            raise ValueError("must be `exact`, `fast`, or a mapping with `mode` and `native`")
        return value
