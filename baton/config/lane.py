"""Fleet file section on one of several models: its files, its workers and its latencies."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from baton.config.clients import SloConfig
from baton.config.other_words import OTHER_WORDS, WITHOUT_MEANING
from baton.config.pools import PoolsConfig
from baton.config.section import Section
from baton.types.trust import TrustRules

# NAME, or NAME@3 for one of several versions of it
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}(@[1-9][0-9]{0,5})?$"
LaneName = Annotated[str, StringConstraints(pattern=_NAME)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]

_OF_THE_FLEET = ("routers", "ports", "tls", "insecure", "token_file", "unsigned_pulls")


class AdaptersConfig(Section):
    """LoRA adapters. Paths are directories that the router and every worker can read."""

    load: Mapping[ModelName, str] = {}  # adapter name for clients -> directory
    folder: str | None = None  # folder of adapters that are loaded at run time
    max_loaded: Annotated[int, Field(ge=0, le=1024)] = 8  # adapters in a worker's memory; 0: none
    max_rank: Annotated[int, Field(ge=1, le=512)] = 64  # largest rank of an adapter


class GatesConfig(Section):
    """Conditions that a model meets before its workers start, and while it is a canary."""

    # golden prompts, one JSON object a line
    golden: Annotated[str, StringConstraints(min_length=1)] | None = None
    licences: Annotated[tuple[ModelName, ...], Field(strict=False)] = ()  # allowed; none: any
    # digest of the weights in hexadecimal, or its first digits
    weights_digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{12,32}$")] | None = None
    signature: str | None = None  # detached signature by model-signing
    verify_key: str | None = None  # public key of the signature, in PEM

    def trust(self) -> TrustRules:
        """Return the rules about the files of the model."""
        return TrustRules(
            licences=self.licences,
            weights_digest=self.weights_digest or "",
            signature=self.signature or "",
            verify_key=self.verify_key or "",
        )

    @model_validator(mode="after")
    def _signature_needs_key(self) -> Self:
        if (self.signature is None) != (self.verify_key is None):
            raise ValueError("gates: signature and verify_key are used together")
        return self


class LaneConfig(Section):
    """A model beside others. Keys that it leaves out, also within `pools`, are the fleet's."""

    model_config = ConfigDict(protected_namespaces=())

    # reference, as `model:` of the fleet
    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    chat_template: str | None = None
    max_context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    adapters: AdaptersConfig = AdaptersConfig()
    kv_blocks_per_worker: Annotated[int, Field(ge=8, le=67_108_864)] | Literal["auto"] = "auto"
    pools: PoolsConfig = PoolsConfig()
    slo: SloConfig | None = None
    gates: GatesConfig = GatesConfig()
    removed = WITHOUT_MEANING
    other_words = OTHER_WORDS

    def over(self, fleet: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the fleet file with those of this lane in their place.

        Raises:
            ValueError: The lane sets a key that holds for the whole fleet.
        """
        own = self.model_dump(exclude_unset=True, exclude={"gates"})
        pools = own.get("pools", {})
        if common := [key for key in _OF_THE_FLEET if key in pools]:
            raise ValueError(f"pools.{common[0]} holds for all models: set it in `pools` itself")
        return {**fleet, **own, "pools": {**(fleet.get("pools") or {}), **pools}}
