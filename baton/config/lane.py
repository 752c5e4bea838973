"""Fleet file section on one of several models: its files, its workers and its latencies."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from baton.config.clients import SloConfig
from baton.config.pools import PoolsConfig
from baton.config.section import Section

LaneName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=200)]

_OF_THE_FLEET = ("routers", "ports", "tls", "insecure", "token_file", "unsigned_pulls")


class AdaptersConfig(Section):
    """LoRA adapters. Paths are directories that the router and every worker can read."""

    load: Mapping[ModelName, str] = {}  # adapter name for clients -> directory
    folder: str | None = None  # folder of adapters that are loaded at run time
    max_loaded: Annotated[int, Field(ge=0, le=1024)] = 8  # adapters in a worker's memory; 0: none
    max_rank: Annotated[int, Field(ge=1, le=512)] = 64  # largest rank of an adapter


class GatesConfig(Section):
    """Conditions that a model meets before and while it answers as a canary."""

    # golden prompts, one JSON object a line
    golden: Annotated[str, StringConstraints(min_length=1)] | None = None


class LaneConfig(Section):
    """A model beside others. Keys that it leaves out, also within `pools`, are the fleet's."""

    model_config = ConfigDict(protected_namespaces=())

    model: Annotated[str, StringConstraints(min_length=1)]  # reference, as `model:` of the fleet
    chat_template: str | None = None
    max_context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    adapters: AdaptersConfig = AdaptersConfig()
    kv_blocks_per_worker: Annotated[int, Field(ge=8, le=67_108_864)] | Literal["auto"] = "auto"
    pools: PoolsConfig = PoolsConfig()
    slo: SloConfig | None = None
    gates: GatesConfig = GatesConfig()

    def over(self, fleet: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the fleet file with those of this lane in their place.

        Raises:
            ValueError: The lane sets a key that holds for the whole fleet.
        """
        own = self.model_dump(exclude_unset=True, exclude={"gates"})
        pools = own.get("pools", {})
        if common := [key for key in _OF_THE_FLEET if key in pools]:
            raise ValueError(f"pools.{common[0]} holds for all models: set it in `pools` itself")
        if pools.get("roles") == "auto" or (fleet.get("pools") or {}).get("roles") == "auto":
            raise ValueError("`roles: auto` needs a fleet with one model: set prefill and decode")
        return {**fleet, **own, "pools": {**(fleet.get("pools") or {}), **pools}}
