"""Configuration of a router, frozen at start: of the process, and of each model that it serves."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from baton.config.clients import ClientLimitsConfig, SloConfig
from baton.config.fleet_file import FleetConfig
from baton.config.golden_file import read_golden
from baton.config.logs import LogsConfig
from baton.config.network import HttpsConfig
from baton.types.gates import GoldenPrompt
from baton.types.lanes import lane_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Configuration of one process, from the fleet file and the environment.

    Attributes:
        start_limit_s: Time after which the router listens even if workers are not connected.
        audit_file: File of the audit log; empty: it is on another host.
        lease_ms: Time for which a worker keeps requests of a router that sends no heartbeat.
        silence_s: Time after which a silent worker counts as dead.
        reopen_s: Time within which a broken stream must be open again.
        repair_wait_s: Time for which a request waits until a lost prefill worker is replaced.
        probe_pause_s: Minimum time between two rounds of probes.
        unary_prompt_bytes: Size above which encoded prompts with grammars get a separate RPC.
        picker_port: gRPC port of the endpoint picker for gateways; 0: there is none.
        picker_tls: Files of its certificate and key; empty: plain text.
    """

    fleet: str = "local"
    host: str = "127.0.0.1"
    port: int = 8000
    clients: ClientLimitsConfig = field(default_factory=ClientLimitsConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
    https: HttpsConfig | None = None
    share_cache: bool = False
    default_timeout_s: float = 600.0
    redis_url: str = field(default="", repr=False)
    state_dir: str = ""
    audit_file: str = ""
    start_limit_s: float = 2.0
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
    max_body_bytes: int = 4 * 1024 * 1024
    kept_records: int = 2048
    picker_port: int = 0
    picker_tls: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: FleetConfig, *, port: int | None = None) -> Self:
        """Return the settings for the fleet that ``config`` describes.

        The environment has what other users must not read on command lines, and what is of this
        host: ``BATON_REDIS_URL``, the folder ``BATON_STATE_DIR``, ``BATON_AUDIT_FILE``, and of an
        endpoint picker ``BATON_PICKER`` and ``BATON_PICKER_TLS``.
        """
        environ = os.environ
        return cls(
            fleet=config.fleet,
            host=config.host,
            port=config.port if port is None else port,
            clients=config.clients,
            logs=config.logs,
            https=config.clients.tls,
            share_cache=config.share_cache_between_tenants,
            default_timeout_s=config.default_timeout_s,
            redis_url=environ.get("BATON_REDIS_URL", ""),
            state_dir=environ.get("BATON_STATE_DIR", ""),
            audit_file=environ.get("BATON_AUDIT_FILE", ""),
            picker_port=int(environ.get("BATON_PICKER", "0")),
            picker_tls=tuple(filter(None, environ.get("BATON_PICKER_TLS", "").split(os.pathsep))),
        )

    def lane_dir(self, lane_fleet: str) -> Path | None:
        """Return the folder of the state of a lane; None without a state folder."""
        if not self.state_dir:
            return None
        lane = lane_of(lane_fleet)
        folder = Path(self.state_dir)
        return folder / "lanes" / lane if lane else folder


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Configuration of one model, from the fleet file.

    Attributes:
        fleet: Name of the fleet; of a lane beside others ``FLEET.LANE``.
        model_names: Served name, then its aliases.
        other_models: Names of the fleet's other models, which no adapter may have.
        emulated: Timing model of emulated workers; empty for real ones. Other workers are rejected.
        external: Name of the program that runs the model at workers; empty for Baton's engine.
        attached: Whether that program is attached; then its weights may be elsewhere.
        golden: Golden prompts of the fleet file.
        max_context_tokens: Limit of the context; None: the model's own.
        max_adapters: Number of adapters that a worker holds at once.
        starts_from_zero: The lane may have no workers: requests wait for the first one.
        window_requests: Largest number of sequences at one worker; more wait in the router's queue.
        pull_prefixes: Whether a worker may pull a cached prefix from another one.
        price_per_hour: Price of one worker for one hour.
        tie_s: Difference of costs below which placement chooses at random.
    """

    fleet: str = "local"
    model: str
    model_names: tuple[str, ...]
    other_models: tuple[str, ...] = ()
    emulated: str = ""
    external: str = ""
    attached: bool = False
    chat_template: str | None = None
    golden: tuple[GoldenPrompt, ...] = field(default=(), repr=False)
    max_context_tokens: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int = 8
    max_adapter_rank: int = 64
    adapter_folder: str | None = None
    max_queued_requests: int = 256
    window_requests: int = 32
    starts_from_zero: bool = False
    slo: SloConfig | None = None
    pull_prefixes: bool = True
    price_per_hour: float = 0.0
    tie_s: float = 0.002

    @classmethod
    def of(
        cls,
        config: FleetConfig,
        *,
        other_models: tuple[str, ...] = (),
        golden: tuple[GoldenPrompt, ...] = (),
    ) -> Self:
        """Return the settings for the configuration of a lane."""
        pools = config.pools
        return cls(
            fleet=config.fleet,
            model=config.model,
            model_names=config.model_names,
            other_models=other_models,
            emulated=pools.engine.emulated or "",
            external=pools.engine.external or "",
            attached=pools.is_attached,
            chat_template=config.chat_template,
            golden=golden,
            max_context_tokens=config.max_context_tokens,
            adapters=config.adapters.load,
            max_adapters=config.adapters.max_loaded,
            max_adapter_rank=config.adapters.max_rank,
            adapter_folder=config.adapters.folder,
            max_queued_requests=config.max_queued_requests,
            window_requests=config.max_batch_requests,
            starts_from_zero=pools.bounds is not None and pools.bounds.min == 0,
            slo=config.slo,
            pull_prefixes=pools.pull_prefixes and pools.moves_blocks,
            price_per_hour=pools.auto.price_per_hour if pools.auto is not None else 0.0,
        )

    @classmethod
    def of_lanes(cls, config: FleetConfig) -> tuple[Self, ...]:
        """Return the settings of each lane of a fleet.

        Raises:
            GoldenFileError: A file of golden prompts cannot be used.
        """
        lanes = config.lanes
        return tuple(
            cls.of(
                lane,
                other_models=tuple(
                    name for other in lanes if other is not lane for name in other.model_names
                ),
                golden=read_golden(lane.gates.golden) if lane.gates.golden is not None else (),
            )
            for lane in lanes
        )
