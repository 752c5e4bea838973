"""Fleet file section on worker pools: replicas, ranks, engine, ports."""

from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from baton.config.attached import AttachedServers
from baton.config.external_engine import ExternalKind, LlamaServerConfig, VllmConfig
from baton.config.network import AbsoluteFile, FleetTlsConfig
from baton.config.section import Section
from baton.control_groups import usable_cpus

CORES_OF_A_ROUTER = 4
MAX_WORKERS = 1024  # of a role


class EngineConfig(Section):
    """Engine of all workers: `real`, `vllm`, `llama-server`, `emulated`, or `{emulated: TIMING}`.

    It applies to the whole fleet: emulated and real workers cannot exchange KV.

    Attributes:
        emulated: Timing model of emulated engines; none for real ones.
        external: Program that runs the model instead of Baton's engine.
    """

    # names in baton.engine.emulated_timing.TIMINGS
    emulated: Literal["epyc-135m", "h100-70b"] | None = None
    external: ExternalKind | None = None

    @model_validator(mode="before")
    @classmethod
    def _word_to_mapping(cls, value: object) -> object:
        words: dict[str, dict[str, object]] = {
            "real": {},
            "emulated": {"emulated": "epyc-135m"},
            "vllm": {"external": "vllm"},
            "llama-server": {"external": "llama-server"},
        }
        if isinstance(value, str):
            if value not in words:
                raise ValueError(
                    "must be `real`, `vllm`, `llama-server`, `emulated`, or a mapping with "
                    "`emulated: TIMING`"
                )
            return words[value]
        return value

    def check(self, requested: dict[str, bool]) -> None:
        """Refuse features that only real engines have.

        Args:
            requested: Fleet file keys, and whether the file sets them.
        """
        for key in (key for key, is_set in requested.items() if is_set and self.emulated):
            raise ValueError(f"{key}: emulated engines (pools.engine) do not support it")


class TensorParallelConfig(Section):
    """Ranks of one replica, per pool. In YAML, one number sets both pools.

    Attributes:
        memory: KV memory of a replica: ``shared`` is one pool for all ranks, ``own`` one pool
            per rank with that rank's heads.
    """

    prefill: Annotated[int, Field(ge=1, le=64)] = 1  # ranks of a prefill worker
    decode: Annotated[int, Field(ge=1, le=64)] = 1  # ranks of a decode worker
    memory: Literal["shared", "own"] = "shared"

    removed = MappingProxyType(
        {
            "nodes": "ranks of a replica are on one host. Remove the key, or use vLLM workers "
            "(pools.vllm) for a model that is larger than a host"
        }
    )


class KvTiersConfig(Section):
    """Storage of each worker for KV that its pool has no room for; 0 disables a tier.

    Attributes:
        memory_mb: Host memory per worker in MB, in addition to its pool.
        disk_folder: Absolute path of a folder on every host; each worker creates its own
            subfolder.
        disk_shared: Workers read the blocks in each other's subfolders, too. On several hosts the
            folder must be one on a shared file system.
    """

    memory_mb: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    disk_mb: Annotated[int, Field(ge=0, le=268_435_456)] = 0  # disk space per worker in MB
    disk_folder: AbsoluteFile | None = None
    disk_shared: bool = False

    @model_validator(mode="after")
    def _disk_requires_folder(self) -> Self:
        if self.disk_shared and not self.disk_mb:
            raise ValueError("disk_shared needs `disk_mb`, the disk space of each worker")
        if self.disk_mb and self.disk_folder is None:
            raise ValueError("disk_mb needs `disk_folder: FOLDER`, an absolute path")
        return self


class SizeBounds(NamedTuple):
    """Bounds of the number of workers of both roles together."""

    min: int
    max: int


class AutoPoolsConfig(Section):
    """Sizes that the planner may choose, and what a worker costs.

    Attributes:
        min: Least number of workers of both roles together; 0 lets a fleet without requests end
            all its workers.
        max: Largest number of workers of both roles together. Without ``min`` and ``max``, only
            operators change sizes.
        price_per_hour: Price of one worker for one hour, in any currency. Usage and metrics give
            costs in this currency.
    """

    min: Annotated[int, Field(ge=0, le=MAX_WORKERS)] | None = None
    max: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    price_per_hour: Annotated[float, Field(ge=0.0, le=1_000_000.0)] = 0.0

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if (self.min is None) != (self.max is None):
            raise ValueError("needs `min` and `max` together")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("`min` must not be above `max`")
        return self


class PoolsConfig(Section):
    """Worker pools and routers. A fleet with one pool is colocated.

    Attributes:
        auto: Bounds for the planner's choice of sizes, and the price of a worker.
        kv_tiers: KV storage below each worker's pool, see ``docs/design/kv-tiers.md``.
        ports: Port range ``FIRST-LAST`` of the workers, for firewalls. Without it, the kernel
            chooses.
        tls: Certificates of all routers and workers. Without them, they use plain text.
        token_file: File with the fleet's token on every host, one per line: the first is sent,
            all are accepted. Without it, `baton up` generates a token for its workers.
        unsigned_pulls: Send KV also without a capability from a router. Needed while routers or
            workers run versions without capabilities.
        int8_chunks: In ``numerics: fast``, send KV as int8 over links where that is faster.
        receive_cpu_share: Largest share of a core for receiving KV while a worker generates
            responses; 0 is no limit. See ``docs/design/handoff.md``.
        idle_sleep_s: Time without requests after which a worker gives back the memory of its KV
            pool; 0: never. See ``docs/guide/models.md``.
        routers: Router processes that share the port; ``auto`` is one per `CORES_OF_A_ROUTER`
            cores of the host. ``docs/guide/operate.md`` lists the state that they share.
    """

    prefill: Annotated[int, Field(ge=0, le=512)] = 1  # number of prefill workers
    decode: Annotated[int, Field(ge=0, le=512)] = 1  # decode workers; alone, they compute prompts
    routers: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = 1
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    auto: AutoPoolsConfig | None = None
    engine: EngineConfig = EngineConfig()
    vllm: VllmConfig | None = None  # needed with `engine: vllm`
    llama_server: LlamaServerConfig | None = None  # needed with `engine: llama-server`
    kv_tiers: KvTiersConfig = KvTiersConfig()
    ports: Annotated[str, StringConstraints(pattern=r"^\d{4,5}-\d{4,5}$")] | None = None
    tls: FleetTlsConfig | None = None
    insecure: bool = False  # confirms plain text between hosts
    token_file: AbsoluteFile | None = None
    unsigned_pulls: bool = False
    int8_chunks: bool = True
    pull_prefixes: bool = True  # let workers pull prefixes of a prompt from each other's caches
    receive_cpu_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.025
    idle_sleep_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0

    removed = MappingProxyType(
        {
            "roles": "set `prefill` and `decode`, such as `prefill: 0` and `decode: 1` for one "
            "worker with all cores"
        }
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_attached_servers(cls, value: object) -> object:
        """Let a fleet of attached servers have no sizes of its own."""
        if not isinstance(value, dict):
            return value
        sections = (value.get("vllm"), value.get("llama_server"))
        has_servers = any(isinstance(one, dict) and one.get("servers") for one in sections)
        return {"prefill": 0, "decode": 1, **value} if has_servers else value

    @model_validator(mode="after")
    def _attached_servers_have_roles(self) -> Self:
        if self.is_attached and (self.start_sizes != {"prefill": 0, "decode": 1} or self.auto):
            raise ValueError(
                "prefill, decode and auto are not for attached servers, each of which has a role: "
                "remove them"
            )
        return self

    @field_validator("ports")
    @classmethod
    def _check_port_range(cls, value: str | None) -> str | None:
        first, _, last = (value or "1024-65535").partition("-")
        if not 1024 <= int(first) < int(last) <= 65_535:
            raise ValueError("must be FIRST-LAST, from 1024 to 65535")
        return value

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _number_to_both_pools(cls, value: object) -> object:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return {"prefill": value, "decode": value} if is_number else value

    @model_validator(mode="after")
    def _tiers_require_shared_memory(self) -> Self:
        tiers = self.kv_tiers.memory_mb or self.kv_tiers.disk_mb
        if self.tensor_parallel.memory == "own" and tiers:
            raise ValueError("kv_tiers need `tensor_parallel: {memory: shared}`")
        return self

    @model_validator(mode="after")
    def _only_pools_in_host_memory_sleep(self) -> Self:
        if self.idle_sleep_s and (self.engine.external is not None or self.widest > 1):
            raise ValueError(
                "idle_sleep_s: only for Baton's own engine without tensor_parallel; remove one"
            )
        return self

    @model_validator(mode="after")
    def _external_engines_lack_features(self) -> Self:
        kind = self.engine.external
        if (kind == "vllm") != (self.vllm is not None):
            raise ValueError(
                "`engine: vllm` and `vllm: {python: FILE}` or `vllm: {servers: …}` need each other"
            )
        if (kind == "llama-server") != (self.llama_server is not None):
            raise ValueError(
                "`engine: llama-server` and `llama_server: {servers: …}` need each other"
            )
        if kind is None:
            return self
        hand_off = self.vllm.hand_off if self.vllm is not None else None
        if self.prefill and hand_off is None:
            raise ValueError(
                f"{kind} workers hand over KV only with `{kind}: {{hand_off: nixl}}`: set it, or "
                "`prefill: 0` and the number of workers in `decode`"
            )
        if hand_off == "nixl" and self.tls is not None:
            raise ValueError(
                f"{kind}: hand_off: nixl moves KV in plain text, and `tls` excludes that: remove "
                "one of them"
            )
        if self.kv_tiers.memory_mb or self.kv_tiers.disk_mb:
            raise ValueError(
                f"kv_tiers: not for {kind} workers; vllm has `vllm: {{kv_tiers: …}}`, without a "
                "disk: vLLM 0.32 checks no digests of the files that it reads"
            )
        if self.widest > 1:
            raise ValueError(
                f"tensor_parallel: not for {kind} workers; use `--tensor-parallel-size` in "
                f"pools.{kind}.args"
            )
        return self

    @model_validator(mode="after")
    def _bounds_hold_the_start(self) -> Self:
        if (bounds := self.bounds) is None:
            return self
        if self.total > bounds.max:
            raise ValueError(
                f"prefill + decode is {self.total}, more than `auto.max`, which is {bounds.max}"
            )
        return self

    def width(self, role: Literal["prefill", "decode"]) -> int:
        """Return the number of ranks of one replica of a pool."""
        ranks = self.tensor_parallel
        return ranks.prefill if role == "prefill" else ranks.decode

    @property
    def roles_differ(self) -> bool:
        """True if workers of the roles have unequal processes, and so cannot change roles."""
        own = self.vllm is not None and self.vllm.prefill_args != ()
        return own or self.width("prefill") != self.width("decode")

    @property
    def servers(self) -> AttachedServers | None:
        """Servers that are attached; None if this fleet starts its workers."""
        section = self.vllm or self.llama_server
        return section.servers if section is not None else None

    @property
    def hand_off(self) -> str:
        """Way of KV between engines of others; empty: none."""
        return (self.vllm.hand_off or "") if self.vllm is not None else ""

    @property
    def moves_blocks(self) -> bool:
        """True if workers can pull single blocks of each other's caches."""
        return self.engine.external is None or self.hand_off == "baton"

    @property
    def is_attached(self) -> bool:
        """True if the servers are attached."""
        return self.servers is not None

    @property
    def gpus(self) -> int:
        """Number of GPUs that Ray reserves for each worker."""
        return 0 if self.vllm is None else self.vllm.gpus

    @property
    def ranks(self) -> list[int]:
        """Number of ranks of every replica."""
        prefill = self.width("prefill")
        decode = self.width("decode")
        return [prefill] * self.prefill + [decode] * self.decode

    @property
    def widest(self) -> int:
        """Largest number of ranks of a replica that the fleet has, or may grow to."""
        grows = (self.bounds is not None) * [self.width("prefill"), self.width("decode")]
        return max([*self.ranks, *grows], default=1)

    @property
    def total(self) -> int:
        """Number of replicas of both pools."""
        return self.prefill + self.decode

    @property
    def start_sizes(self) -> dict[str, int]:
        """Number of replicas by role with which a fleet starts."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def bounds(self) -> SizeBounds | None:
        """Bounds of the planner's sizes; None if only operators change sizes."""
        if self.auto is None or self.auto.min is None or self.auto.max is None:
            return None
        return SizeBounds(self.auto.min, self.auto.max)

    @property
    def most_workers(self) -> int:
        """Largest number of replicas that the fleet may grow to by itself."""
        return max(self.total, self.bounds.max if self.bounds is not None else 0)

    @property
    def router_count(self) -> int:
        """Number of router processes on this host."""
        if self.routers == "auto":
            return max(usable_cpus() // CORES_OF_A_ROUTER, 1)
        return self.routers
