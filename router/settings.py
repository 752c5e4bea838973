"""A router's configuration, frozen at start."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from baton.config.clients import (
    KEYS_IN_REDIS,
    ApiKeyConfig,
    ClientLimitsConfig,
    SloConfig,
)
from baton.config.fleet_file import FleetConfig
from baton.config.golden_file import read_golden
from baton.config.lane import GatesConfig
from baton.config.logs import LogsConfig
from baton.config.network import HttpsConfig
from baton.config.secrets import ApiKeysFile
from baton.tenants.tenants_file import TenantsFile
from baton.types.gates import GoldenPrompt
from baton.types.lanes import lane_of
from baton.wire.fleet_token import FleetToken
from baton.wire.tls import FleetTls
from router.tenants.key_table import KeyTable
from router.tenants.policies import TenantPolicies

_OF_A_MODEL = (
    "fleet",
    "model",
    "model_names",
    "emulated",
    "external",
    "attached",
    "chat_template",
    "max_context_tokens",
    "adapters",
    "max_adapters",
    "max_adapter_rank",
    "adapter_folder",
    "window_requests",
    "starts_from_zero",
    "slo",
    "pull_prefixes",
    "price_per_hour",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Configuration of one router, from the fleet file and the environment.

    Attributes:
        emulated: Timing model of emulated workers; empty for real ones. Other workers are rejected.
        external: Name of the program that runs the model at workers; empty for Baton's engine.
        attached: Whether that program is attached; then its weights may be elsewhere.
        fleet: Name of the fleet; of a lane ``FLEET.LANE``.
        model_names: Served name, then its aliases.
        other_models: Names of the fleet's other models, which no adapter may have.
        golden: Golden prompts of the fleet file.
        max_context_tokens: Limit of the context; None: the model's own.
        api_keys: API keys of the fleet file to their rights; None: requests need no key.
        issued_keys: API keys of ``baton keys``.
        audit_file: File of the audit log; empty: it is on another host.
        policies: Policies and deletions of tenants.
        tenants_file: File with these policies; None: they are in Redis.
        own_key: Key with which this process calls itself for a tenant.
        start_limit_s: Time after which the router listens even if workers are not connected.
        probe_pause_s: Minimum time between two rounds of probes.
        max_adapters: Number of adapters that a worker holds at once.
        starts_from_zero: The fleet may have no workers: requests wait for the first one.
        window_requests: Largest number of sequences at one worker; more wait in the router's queue.
        lease_ms: Time for which a worker keeps requests of a router that sends no heartbeat.
        silence_s: Time after which a silent worker counts as dead.
        pull_prefixes: Whether a worker may pull a cached prefix from another one.
        reopen_s: Time within which a broken stream must be open again.
        repair_wait_s: Time for which a request waits until a lost prefill worker is replaced.
        price_per_hour: Price of one worker for one hour.
        unary_prompt_bytes: Size above which encoded prompts with grammars get a separate RPC.
    """

    fleet: str = "local"
    model: str
    model_names: tuple[str, ...]
    emulated: str = ""
    external: str = ""
    attached: bool = False
    chat_template: str | None = None
    other_models: tuple[str, ...] = ()
    golden: tuple[GoldenPrompt, ...] = field(default=(), repr=False)
    max_context_tokens: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, ApiKeyConfig] | None = field(default=None, repr=False)
    clients: ClientLimitsConfig = field(default_factory=ClientLimitsConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    start_limit_s: float = 2.0
    share_cache: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int = 8
    max_adapter_rank: int = 64
    adapter_folder: str | None = None
    max_queued_requests: int = 256
    window_requests: int = 32
    starts_from_zero: bool = False
    default_timeout_s: float = 600.0
    slo: SloConfig | None = None
    redis_url: str = field(default="", repr=False)
    # Not compared: these objects follow changes of their files, or are new in each process.
    issued_keys: KeyTable = field(default_factory=KeyTable, repr=False, compare=False)
    policies: TenantPolicies = field(default_factory=TenantPolicies, repr=False, compare=False)
    tenants_file: TenantsFile | None = field(default=None, repr=False, compare=False)
    own_key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False, compare=False)
    fleet_token: FleetToken = field(default_factory=FleetToken, repr=False, compare=False)
    tls: FleetTls | None = field(default=None, repr=False, compare=False)
    https: HttpsConfig | None = None
    state_dir: str = ""
    audit_file: str = ""
    heartbeat_s: float = 0.5
    lease_ms: int = 5000
    silence_s: float = 2.0
    reopen_s: float = 1.0
    repair_wait_s: float = 60.0
    dead_shown_s: float = 60.0
    probe_every_s: float = 10.0
    probe_pause_s: float = 1.0
    probe_timeout_s: float = 5.0
    keep_alive_s: float = 10.0
    unary_prompt_bytes: int = 64 * 1024
    tie_s: float = 0.002
    price_per_hour: float = 0.0
    pull_prefixes: bool = True
    max_body_bytes: int = 4 * 1024 * 1024
    kept_records: int = 2048

    @classmethod
    def from_config(cls, config: FleetConfig, *, port: int | None = None) -> Self:
        """Return the settings for the fleet that ``config`` describes.

        Environment variables contain the secrets, because other users can read command lines:
        ``BATON_REDIS_URL``, and ``BATON_FLEET_TOKEN`` or the path ``BATON_FLEET_TOKEN_FILE``.
        ``BATON_STATE_DIR`` is the path of the state folder, and ``BATON_AUDIT_FILE`` that of the
        audit log.

        Raises:
            SecretError, CertificateError: A file cannot be used.
        """
        environ = os.environ
        return cls(
            fleet=config.fleet,
            model=config.model,
            model_names=config.model_names,
            emulated=config.pools.engine.emulated or "",
            external=config.pools.engine.external or "",
            attached=config.pools.is_attached,
            chat_template=config.chat_template,
            max_context_tokens=config.max_context_tokens,
            host=config.host,
            port=config.port if port is None else port,
            api_keys=_api_keys(config),
            clients=config.clients,
            tenants_file=TenantsFile.beside(config.clients.api_keys_file),
            logs=config.logs,
            share_cache=config.share_cache_between_tenants,
            adapters=config.adapters.load,
            max_adapters=config.adapters.max_loaded,
            max_adapter_rank=config.adapters.max_rank,
            adapter_folder=config.adapters.folder,
            max_queued_requests=config.max_queued_requests,
            window_requests=config.max_batch_requests,
            starts_from_zero=(bounds := config.pools.bounds) is not None and bounds.min == 0,
            default_timeout_s=config.default_timeout_s,
            slo=config.slo,
            pull_prefixes=config.pools.pull_prefixes and config.pools.engine.external is None,
            price_per_hour=config.pools.auto.price_per_hour if config.pools.auto else 0.0,
            redis_url=environ.get("BATON_REDIS_URL", ""),
            fleet_token=_fleet_token(config),
            tls=FleetTls(files) if (files := config.tls_files) is not None else None,
            https=config.clients.tls,
            state_dir=environ.get("BATON_STATE_DIR", ""),
            audit_file=environ.get("BATON_AUDIT_FILE", ""),
        )

    @classmethod
    def of_lanes(cls, config: FleetConfig, *, port: int | None = None) -> "tuple[Self, ...]":
        """Return the settings of each lane, which share keys, limits and secrets.

        Raises:
            GoldenFileError, SecretError, CertificateError: A file cannot be used.
        """
        lanes = config.lanes
        names = [lane.model_names for lane in lanes]
        others = [
            tuple(name for other in names if other is not own for name in other) for own in names
        ]
        first = cls.from_config(lanes[0], port=port)
        found = []
        gates = [one.gates for one in config.models.values()] or [GatesConfig()]
        for lane, other, gate in zip(lanes, others, gates, strict=True):
            own = cls.from_config(lane, port=port)
            of_model = {name: getattr(own, name) for name in _OF_A_MODEL}
            golden = read_golden(gate.golden) if gate.golden is not None else ()
            found.append(replace(first, **of_model, other_models=other, golden=golden))
        return tuple(found)

    @property
    def lane_dir(self) -> Path | None:
        """Folder of the state of this lane; None without a state folder."""
        if not self.state_dir:
            return None
        lane = lane_of(self.fleet)
        folder = Path(self.state_dir)
        return folder / "lanes" / lane if lane else folder


def _api_keys(config: FleetConfig) -> Mapping[str, ApiKeyConfig] | None:
    file = config.clients.api_keys_file
    if file not in (None, KEYS_IN_REDIS):
        return ApiKeysFile(file)
    return dict(config.api_keys or {}) if config.has_keys else None


def _fleet_token(config: FleetConfig) -> FleetToken:
    file = config.pools.token_file or os.environ.get("BATON_FLEET_TOKEN_FILE", "")
    return FleetToken.of(file, os.environ.get("BATON_FLEET_TOKEN", ""))
