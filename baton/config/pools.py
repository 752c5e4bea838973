"""The pools of a fleet: how many replicas, of how many ranks, of which engine, on which ports."""

import os
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from baton.config.engine import EngineConfig
from baton.config.network import AbsoluteFile, FleetTlsConfig

CORES_OF_A_ROUTER = 4


class TensorParallelConfig(BaseModel):
    """Ranks of one replica, for each pool. In YAML also one number for both.

    Attributes:
        memory: Of KV: ``shared`` is one pool for all ranks of a replica, ``own`` a pool for each,
            with its heads only.
        nodes: Of a cluster, that a replica's ranks may be on: ``one``, or ``several`` where one has
            no room for all. ``docs/design/engine.md``.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    prefill: Annotated[int, Field(ge=1, le=64)] = 1  # ranks of a prefill worker
    decode: Annotated[int, Field(ge=1, le=64)] = 1  # ranks of a decode worker
    memory: Literal["shared", "own"] = "shared"
    nodes: Literal["one", "several"] = "one"

    @model_validator(mode="after")
    def _ranks_on_several_nodes_share_nothing(self) -> Self:
        if self.nodes == "several" and self.memory == "shared":
            raise ValueError("`nodes: several` needs `memory: own`: hosts share no memory")
        if self.nodes == "several" and max(self.prefill, self.decode) == 1:
            raise ValueError("`nodes: several` is for ranks: say `prefill` or `decode` above 1")
        return self


class KvTiersConfig(BaseModel):
    """Where each worker keeps KV that its pool has no room for; 0: nowhere.

    Attributes:
        memory_mb: Of host memory, for each worker, beside its pool.
        disk_mb: Of a disk, for each worker.
        disk_folder: On that disk, on every host; each worker makes a folder of its own in it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    memory_mb: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    disk_mb: Annotated[int, Field(ge=0, le=268_435_456)] = 0
    disk_folder: AbsoluteFile | None = None

    @model_validator(mode="after")
    def _a_disk_has_a_folder(self) -> Self:
        if self.disk_mb and self.disk_folder is None:
            raise ValueError("disk_mb needs `disk_folder: FOLDER`, an absolute path")
        return self


class PoolsConfig(BaseModel):
    """How many replicas each pool has. A fleet of one pool only is the colocated mode.

    Attributes:
        roles: ``auto`` chooses ``prefill`` and ``decode`` for one host, by what was measured on it
            (``fleet/host_roles.py``); until then they are a pair.
        kv_tiers: Below each worker's pool: ``docs/design/kv-tiers.md``.
        ports: ``FIRST-LAST`` that workers listen on, for firewalls; None: the kernel chooses.
        tls: Certificates of all routers and workers. Without, they speak plain text.
        insecure: Says that plain text between hosts is meant.
        token_file: The fleet's token on every host, one a line: the first is shown to others, all
            are accepted. Without, `baton up` tells the workers its own.
        unsigned_pulls: KV is also handed to whoever has no capability of a router: for as long as
            routers or workers of versions run that know none.
        int8_chunks: In ``numerics: fast``, KV may travel as int8 over links so slow that it pays.
        pull_prefixes: Workers may have leading blocks of a prompt from each other's caches.
        receive_cpu_share: Of a core, what KV that comes in may take of it while the worker writes
            answers; 0: no limit. ``docs/design/handoff.md``.
        routers: Processes that share the port; ``auto`` is one for every `CORES_OF_A_ROUTER` cores
            of the host. What each of them holds, and what they share: ``docs/guide/operate.md``.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    roles: Literal["fixed", "auto"] = "fixed"
    prefill: Annotated[int, Field(ge=0, le=512)] = 1
    decode: Annotated[int, Field(ge=0, le=512)] = 1
    routers: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    engine: EngineConfig = EngineConfig()
    kv_tiers: KvTiersConfig = KvTiersConfig()
    ports: Annotated[str, StringConstraints(pattern=r"^\d{4,5}-\d{4,5}$")] | None = None
    tls: FleetTlsConfig | None = None
    insecure: bool = False
    token_file: AbsoluteFile | None = None
    unsigned_pulls: bool = False
    int8_chunks: bool = True
    pull_prefixes: bool = True
    receive_cpu_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.025

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, value: str | None) -> str | None:
        first, _, last = (value or "1024-65535").partition("-")
        if not 1024 <= int(first) < int(last) <= 65_535:
            raise ValueError("must be FIRST-LAST, from 1024 to 65535")
        return value

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _one_number_is_for_both(cls, value: object) -> object:
        one = isinstance(value, int) and not isinstance(value, bool)
        return {"prefill": value, "decode": value} if one else value

    @model_validator(mode="after")
    def _tiers_keep_blocks_of_one_pool(self) -> Self:
        tiers = self.kv_tiers.memory_mb or self.kv_tiers.disk_mb
        if self.tensor_parallel.memory == "own" and tiers:
            raise ValueError("kv_tiers need `tensor_parallel: {memory: shared}`")
        return self

    @model_validator(mode="after")
    def _ranks_apart_speak_plain_text(self) -> Self:
        if self.tensor_parallel.nodes == "several" and self.tls is not None:
            raise ValueError(
                "tensor_parallel: `nodes: several` and `tls` exclude each other: ranks are sent "
                "orders and tensors in plain text"
            )
        return self

    @model_validator(mode="after")
    def _roles_are_said_once(self) -> Self:
        if self.roles == "auto" and {"prefill", "decode"} & self.model_fields_set:
            raise ValueError("`roles: auto` chooses prefill and decode: leave these out")
        if self.roles == "auto" and max(self.ranks) > 1:
            raise ValueError("`roles: auto` chooses among workers of one rank: say prefill, decode")
        return self

    def width(self, role: Literal["prefill", "decode"]) -> int:
        """Ranks of one replica of that pool."""
        ranks = self.tensor_parallel
        return ranks.prefill if role == "prefill" else ranks.decode

    def ranks_apart(self, role: Literal["prefill", "decode"]) -> bool:
        """Whether the ranks of that pool's replicas are placed each by itself."""
        return self.tensor_parallel.nodes == "several" and self.width(role) > 1

    @property
    def ranks(self) -> list[int]:
        """The width of every replica."""
        prefill = self.width("prefill")
        decode = self.width("decode")
        return [prefill] * self.prefill + [decode] * self.decode

    @property
    def total(self) -> int:
        """Replicas of both pools."""
        return self.prefill + self.decode

    @property
    def router_count(self) -> int:
        """Router processes on this host."""
        if self.routers == "auto":
            return max((os.cpu_count() or 1) // CORES_OF_A_ROUTER, 1)
        return self.routers
