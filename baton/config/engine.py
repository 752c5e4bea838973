"""Sections of the fleet file for a model: numerics, quantisation, speculation."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    StringConstraints,
    model_validator,
)

from baton.config.section import Section


class NumericsConfig(Section):
    """Numerics of the fleet: `exact`, `fast`, or a mapping with `mode` and `native`.

    Attributes:
        mode: Guarantee of the fleet: ``exact`` gives the same request the same tokens on every
            path, ``fast`` does not.
        native: Summation order of the CPU kernels (``docs/design/engine.md``). In ``exact``,
            workers pair only if their order is the same. ``auto`` is the fastest order of each
            host, so a fleet of mixed CPUs sets ``tile`` or ``vdp``; ``off`` uses torch.
    """

    mode: Literal["exact", "fast"] = "exact"
    native: Literal["auto", "tile", "vdp", "off"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _word_to_mode(cls, value: object) -> object:
        if value in ("exact", "fast"):
            return {"mode": value}
        if isinstance(value, dict) and value.get("native") is False:  # YAML's bare `off`
            return {**value, "native": "off"}
        if not isinstance(value, dict | NumericsConfig):
            raise ValueError("must be `exact`, `fast`, or a mapping with `mode` and `native`")
        return value


class QuantisationConfig(Section):
    """Quantisation of weights and KV cache, see ``docs/guide/configuration.md``."""

    weights: Literal["none", "int8", "int4", "fp8"] = "none"  # fp8: on CUDA only
    kv: Literal["none", "int8", "fp8"] = "none"


class SpeculationConfig(Section):
    """Speculative decoding: `off`, `ngram`, or a mapping with `ngram: true` or `draft: MODEL`."""

    ngram: bool = False  # draft tokens from prompt and response
    # reference of a smaller model that proposes draft tokens
    draft: Annotated[str, StringConstraints(min_length=1)] | None = None
    tokens: Annotated[int, Field(ge=1, le=16)] = 4  # draft tokens per step and sequence, at most

    @model_validator(mode="before")
    @classmethod
    def _word_to_mapping(cls, value: object) -> object:
        words: dict[object, dict[str, object]] = {"ngram": {"ngram": True}, "off": {}, False: {}}
        if isinstance(value, str | bool):  # YAML reads a bare `off` as false
            if value not in words:
                raise ValueError("must be `ngram`, `off`, or a mapping with `ngram` or `draft`")
            return words[value]
        return value

    @model_validator(mode="after")
    def _require_one_proposer(self) -> "SpeculationConfig":
        if self.ngram and self.draft:
            raise ValueError("`ngram` and `draft` exclude each other")
        if "tokens" in self.model_fields_set and not (self.ngram or self.draft):
            raise ValueError("needs `ngram: true` or `draft: MODEL` beside `tokens`")
        return self

    def settings(self) -> dict[str, object]:
        """Return the fields of ``baton.engine.core.speculative.proposers.SpeculationSettings``."""
        mode = "draft" if self.draft else "ngram" if self.ngram else "off"
        return {"mode": mode, "draft": self.draft or "", "tokens": self.tokens}
