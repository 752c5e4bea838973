"""Bundles, environments and settings that `ray_controller` passes to Ray."""

import hashlib
import math
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from baton.config.external_engine import adapter_rank_limit
from baton.config.fleet_file import FleetConfig
from baton.control_groups import usable_cpus
from baton.engine.core.speculative.proposers import SpeculationSettings
from baton.engine.settings import (
    EmulatedModel,
    EngineSettings,
    ExternalEngine,
    KvTierSettings,
    default_device,
)
from baton.model.artifact import resolve_model
from baton.model.model_config import ModelConfig
from baton.planner.sizes import SCALE_IN_AFTER_NS
from baton.registry.types import Role, is_worker_name
from baton.types.lanes import worker_prefix
from fleet.pools.controller import HEALTHY_AFTER_NS
from fleet.pools.slots import Launch

NAMESPACE = "baton"
WORKER_PROGRAM = "fleet.worker.worker"  # the module with `Worker` and `WorkerSettings`
_OF_A_LIFE = ("epoch", "role", "turn")  # settings that differ between incarnations
_OF_AN_ENGINE = ("workers_on_host", "kv_blocks_before")


class ControllerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a controller, which Ray keeps across its restarts."""

    config_json: str
    redis_url: str
    fleet_token: str
    fleet_token_file: str = ""  # instead of the token: on every node, reread when it changes
    host: str  # address that workers bind; "": each node's own
    inherited: dict[str, str] = {}  # variables that Ray gives to all of its processes
    log_dir: str
    other_workers: int = 0  # workers of the other lanes, with which hosts are shared
    sealed: bool = False  # encrypt secrets on their way through Ray: ``fleet.pools.sealing``
    program: str = WORKER_PROGRAM
    healthy_after_ns: int = HEALTHY_AFTER_NS
    scale_in_after_ns: int = SCALE_IN_AFTER_NS

    @property
    def digest(self) -> str:
        """Return a digest, which differs if any field does."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


def specs_of(config: FleetConfig, spec: ControllerSpec) -> dict[str, ControllerSpec]:
    """Return the specification of each lane's controller, by the lane's name in Ray.

    A fleet with one model has one controller, with the specification ``spec``.
    """
    if not config.models:
        return {config.fleet: spec}
    lanes = {name: config.lane(name) for name in config.models}
    workers = {name: lane.pools.most_workers for name, lane in lanes.items()}
    return {
        lane.fleet: msgspec.structs.replace(
            spec,
            config_json=config.only(name).to_json(),
            other_workers=sum(workers.values()) - workers[name],
        )
        for name, lane in lanes.items()
    }


def bundles(config: FleetConfig, role: Role) -> list[dict[str, float]]:
    """Return the bundles of one replica's placement group: one per rank, the leader's first.

    The other ranks are children of the leader's engine process. A vLLM worker is one rank to Baton,
    and its bundle has the GPUs of all ranks of vLLM.
    """
    bundle = {"CPU": config.cpus_per_rank}
    if config.pools.gpus:
        bundle["GPU"] = float(config.pools.gpus)
    return [dict(bundle) for _ in range(config.pools.width(role))]


def local_cpus(config: FleetConfig, cores: int) -> int:
    """Return ``num_cpus`` of a local Ray, large enough for all placement groups."""
    return max(cores, math.ceil(config.cpus_total))


def worker_environment(config: FleetConfig) -> dict[str, str]:
    """Return the environment of a worker's process, set before torch is imported.

    Threads must not spin: with two workers on two cores a step takes 950 ms instead of 18 ms.
    gRPC's `fork` handlers are off: they can crash a child with SIGSEGV between fork and exec.
    """
    auto = config.threads_per_rank == "auto"  # then the worker sets its engine's threads
    threads = "1" if auto else str(config.threads_per_rank)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


def runtime_environment(
    config: FleetConfig, inherited: Mapping[str, str]
) -> dict[str, dict[str, str]] | None:
    """Return Ray's runtime environment of a worker; None if it inherits all of its variables.

    Ray starts some processes in advance. A worker with a runtime environment cannot use these, and
    Ray imports itself twice for it.
    """
    missing = dict(worker_environment(config).items() - inherited.items())
    return {"env_vars": missing} if missing else None


def worker_settings(
    config: FleetConfig, launch: Launch, spec: ControllerSpec, kv_blocks_before: int = 0
) -> dict[str, Any]:
    """Return the fields of ``fleet.worker.worker.WorkerSettings`` for one incarnation.

    ``kv_blocks_before`` is the largest KV pool of earlier ones, 0 if there was none.
    """
    engine = engine_settings(config, launch.role, launch.worker_id, spec.other_workers)
    engine = msgspec.structs.replace(engine, kv_blocks_before=kv_blocks_before)
    return {
        "worker_id": launch.worker_id,
        "role": launch.role,
        "epoch": launch.epoch,
        "turn": launch.turn,
        "fleet": config.fleet,
        "served_model_name": config.model_names[0],
        "engine": msgspec.to_builtins(engine),
        "redis_url": spec.redis_url,
        "fleet_token": spec.fleet_token,
        "fleet_token_file": spec.fleet_token_file,
        "tls": msgspec.to_builtins(config.tls_files),
        "insecure": config.pools.insecure,
        "unsigned_pulls": config.pools.unsigned_pulls,
        "int8_chunks": config.pools.int8_chunks,
        "receive_cpu_share": config.pools.receive_cpu_share,
        "idle_sleep_s": config.pools.idle_sleep_s,
        "host": spec.host,
        "log_dir": spec.log_dir,
        "log_format": config.logs.format,
        "ports": config.pools.ports or "",
        "trust": msgspec.to_builtins(config.gates.trust()),
    }


def engine_settings(
    config: FleetConfig, role: Role, worker_id: str = "", other_workers: int = 0
) -> EngineSettings:
    """Return the engine settings of a pool, or of one worker if its id is given.

    ``other_workers`` belong to other lanes, and share the memory and cores of the hosts.
    """
    return EngineSettings(
        model=config.model,
        dtype=config.dtype,
        numerics=config.numerics.mode,
        native=config.numerics.native,
        weight_quantisation=config.quantisation.weights,
        kv_dtype="" if config.quantisation.kv == "none" else config.quantisation.kv,
        kv_blocks=0 if config.kv_blocks_per_worker == "auto" else config.kv_blocks_per_worker,
        kv_tiers=_kv_tiers(config, worker_id),
        workers_on_host=_workers_on_a_host(config, other_workers),
        device=default_device(),
        threads=0 if config.threads_per_rank == "auto" else config.threads_per_rank,
        max_context_tokens=config.max_context_tokens or 0,  # 0: the model's own
        max_batch_requests=config.max_batch_requests,
        max_step_tokens=config.max_step_tokens,
        max_adapters=config.adapters.max_loaded,
        max_adapter_rank=config.adapters.max_rank,
        sleeps=config.pools.idle_sleep_s > 0,
        speculation=msgspec.convert(config.speculation.settings(), SpeculationSettings),
        tensor_parallel=config.pools.width(role),
        rank_memory=config.pools.tensor_parallel.memory,
        external=_external(config, role),
        emulated=_emulated(config),
    )


def _kv_tiers(config: FleetConfig, worker_id: str) -> KvTierSettings:
    if config.pools.vllm is not None:
        return KvTierSettings(memory_mb=config.pools.vllm.kv_tiers.memory_mb)
    tiers = config.pools.kv_tiers
    folder = Path(tiers.disk_folder or "") / config.fleet / worker_id
    return KvTierSettings(
        memory_mb=tiers.memory_mb,
        disk_mb=tiers.disk_mb,
        disk_folder=str(folder) if tiers.disk_mb else "",
        disk_shared=tiers.disk_shared,
        int8_chunks=config.pools.int8_chunks,
    )


def _external(config: FleetConfig, role: Role) -> ExternalEngine | None:
    vllm = config.pools.vllm
    if config.pools.llama_server is not None:
        return ExternalEngine(kind="llama-server", python="")
    if vllm is None:
        return None
    adapters = vllm.serves_adapters and config.adapters.max_loaded > 0
    limits: tuple[str, ...] = ()
    if adapters:
        rank = adapter_rank_limit(config.adapters.max_rank)
        limits = ("--max-cpu-loras", f"{config.adapters.max_loaded}", "--max-lora-rank", f"{rank}")
    return ExternalEngine(
        kind="vllm",
        python=vllm.python or "",
        args=(*limits, *vllm.args_of(role)),
        adapters=adapters,
        hand_off=vllm.hand_off or "",
        batch_invariant=vllm.batch_invariant,
    )


def _emulated(config: FleetConfig) -> EmulatedModel | None:
    """Return the model's properties for emulated engines, which do not read its files."""
    timing = config.pools.engine.emulated
    if timing is None:
        return None
    model = _model_config(config.model)
    return EmulatedModel(
        timing=timing,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_context_tokens=config.max_context_tokens or model.max_context_tokens,
    )


@cache
def _model_config(reference: str) -> ModelConfig:
    return resolve_model(reference).config


def _workers_on_a_host(config: FleetConfig, other_workers: int) -> int:
    places = math.floor(usable_cpus() / config.cpus_per_rank + 1e-9)
    return max(1, min(config.pools.most_workers + other_workers, places))


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return a digest of a worker's settings.

    It ignores the epoch, the role, which changes at run time, the size of earlier KV pools, and
    the number of workers on the host, so that a growing fleet does not restart its workers.
    """
    same = {name: value for name, value in settings.items() if name not in _OF_A_LIFE}
    if isinstance(engine := same.get("engine"), dict):
        same["engine"] = {n: v for n, v in engine.items() if n not in _OF_AN_ENGINE}
    raw = msgspec.json.encode(same, order="deterministic")
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def actor_name(fleet: str, worker_id: str, epoch: int) -> str:
    """Return the name of an incarnation's Ray actor, unique by its epoch."""
    return f"baton-{fleet}-{worker_id}-{epoch}"


def controller_name(fleet: str) -> str:
    """Return the name of the fleet's detached controller."""
    return f"baton-controller-{fleet}"


def actors_among(names: Sequence[Mapping[str, str]], fleet: str) -> list[tuple[str, int]]:
    """Return worker id and epoch in the name of the workers among Ray's named actors, sorted."""
    workers = []
    stem = f"baton-{fleet}-"
    for entry in names:
        worker_id, _, epoch = entry["name"].removeprefix(stem).rpartition("-")
        ours = entry["namespace"] == NAMESPACE and entry["name"].startswith(stem)
        if ours and is_worker_name(worker_id, worker_prefix(fleet)) and epoch.isdigit():
            workers.append((worker_id, int(epoch)))
    return sorted(workers)


def exit_reason(code: int) -> str:
    """Return an exit code as text."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"killed by signal {-code}"
