"""What a pool asks of Ray: bundles, environments, settings. `ray_controller` carries it out."""

import hashlib
import math
import os
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.engine.core.speculative.proposers import SpeculationSettings
from baton.engine.settings import EmulatedModel, EngineSettings, KvTierSettings
from baton.model.artifact import resolve_model
from baton.model.model_config import ModelConfig
from baton.registry.types import Role
from fleet.pools.controller import HEALTHY_AFTER_NS

NAMESPACE = "baton"
WORKER_PROGRAM = "fleet.worker"  # the module with `Worker` and `WorkerSettings`


class ControllerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller needs to know; survives its restarts as the actor's argument."""

    config_json: str
    redis_url: str
    fleet_token: str
    fleet_token_file: str = ""  # instead of it: on every node, read again when it changes
    host: str  # that workers bind; "" is each node's own address
    log_dir: str
    sealed: bool = False  # secrets go through Ray, which others may read: ``fleet.pools.sealing``
    program: str = WORKER_PROGRAM
    healthy_after_ns: int = HEALTHY_AFTER_NS

    @property
    def digest(self) -> str:
        """Tells what was started with these from what was started with others."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


def bundles(config: FleetConfig, role: Role) -> list[dict[str, float]]:
    """The placement group of one replica: one bundle per rank, the leader's first.

    All are on one node, where the other ranks are children of the leader's engine process; or each
    rank has an actor in its own bundle (``fleet.pools.ray_ranks``).
    """
    return [{"CPU": config.cpus_per_rank} for _ in range(config.pools.width(role))]


def local_cpus(config: FleetConfig, cores: int) -> int:
    """``num_cpus`` of a local Ray: a group larger than that would never become ready."""
    return max(cores, math.ceil(config.cpus_total))


def worker_environment(config: FleetConfig) -> dict[str, str]:
    """Environment of a worker's process, in place before torch is imported.

    Spinning threads of two workers on two cores made an 18 ms step take 950 ms; waiting threads
    that sleep do not. gRPC's handlers of `fork` are off: a process that we start is another program
    at once, and where calls were open they ended some of these by SIGSEGV before it was.
    """
    auto = config.threads_per_rank == "auto"  # the engine's process is told by its shell
    threads = "1" if auto else str(config.threads_per_rank)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }


def worker_settings(
    config: FleetConfig,
    *,
    worker_id: str,
    role: Role,
    epoch: int,
    redis_url: str,
    fleet_token: str,
    host: str,
    log_dir: str,
    fleet_token_file: str = "",
) -> dict[str, Any]:
    """The fields of ``fleet.worker.WorkerSettings`` for one life of a slot."""
    return {
        "worker_id": worker_id,
        "role": role,
        "epoch": epoch,
        "fleet": config.fleet,
        "served_model_name": config.model_names[0],
        "engine": msgspec.to_builtins(engine_settings(config, role, worker_id)),
        "redis_url": redis_url,
        "fleet_token": fleet_token,
        "fleet_token_file": fleet_token_file,
        "tls": msgspec.to_builtins(config.tls_files),
        "insecure": config.pools.insecure,
        "unsigned_pulls": config.pools.unsigned_pulls,
        "int8_chunks": config.pools.int8_chunks,
        "receive_cpu_share": config.pools.receive_cpu_share,
        "host": host,
        "log_dir": log_dir,
        "log_format": config.logs.format,
        "ports": config.pools.ports or "",
        "ranks_apart": config.pools.ranks_apart(role),
    }


def engine_settings(config: FleetConfig, role: Role, worker_id: str = "") -> EngineSettings:
    """How the engines of a pool are built; with a worker's name, that one's."""
    return EngineSettings(
        model=config.model,
        dtype=config.dtype,
        numerics=config.numerics.mode,
        native=config.numerics.native,
        weight_quantisation=config.quantisation.weights,
        kv_dtype="" if config.quantisation.kv == "none" else config.quantisation.kv,
        kv_blocks=0 if config.kv_blocks_per_worker == "auto" else config.kv_blocks_per_worker,
        kv_tiers=_kv_tiers(config, worker_id),
        workers_on_host=_workers_on_a_host(config),
        device=os.environ.get("BATON_DEVICE", "cpu"),
        threads=0 if config.threads_per_rank == "auto" else config.threads_per_rank,
        max_context_tokens=config.max_context_tokens or 0,  # 0: the model's own
        max_batch_requests=config.max_batch_requests,
        max_step_tokens=config.max_step_tokens,
        max_adapters=config.adapters.max_loaded,
        max_adapter_rank=config.adapters.max_rank,
        speculation=msgspec.convert(config.speculation.settings(), SpeculationSettings),
        tensor_parallel=config.pools.width(role),
        rank_memory=config.pools.tensor_parallel.memory,
        emulated=_emulated(config),
    )


def _kv_tiers(config: FleetConfig, worker_id: str) -> KvTierSettings:
    tiers = config.pools.kv_tiers
    folder = Path(tiers.disk_folder or "") / config.fleet / worker_id
    return KvTierSettings(
        memory_mb=tiers.memory_mb,
        disk_mb=tiers.disk_mb,
        disk_folder=str(folder) if tiers.disk_mb else "",
        int8_chunks=config.pools.int8_chunks,
    )


def _emulated(config: FleetConfig) -> EmulatedModel | None:
    """What emulated engines must know of the model; its files are read here, once for all."""
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


def _workers_on_a_host(config: FleetConfig) -> int:
    """The most workers that Ray can place on a machine like this one."""
    places = math.floor((os.cpu_count() or 1) / config.cpus_per_rank + 1e-9)
    return max(1, min(config.pools.total, places))


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Tells settings of a worker from others.

    Which life they are for does not count, nor how many more there are on its host: a fleet that
    grows leaves those alone that it has.
    """
    same = {name: value for name, value in settings.items() if name != "epoch"}
    if isinstance(engine := same.get("engine"), dict):
        same["engine"] = {n: v for n, v in engine.items() if n != "workers_on_host"}
    raw = msgspec.json.encode(same, order="deterministic")
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def actor_name(fleet: str, worker_id: str, epoch: int) -> str:
    """Name of the Ray actor of one life; unique, so an old life is never taken for a new one."""
    return f"baton-{fleet}-{worker_id}-{epoch}"


def controller_name(fleet: str) -> str:
    """Name of the fleet's detached controller."""
    return f"baton-controller-{fleet}"


def lives_among(names: Sequence[Mapping[str, str]], fleet: str) -> dict[str, int]:
    """Worker id -> epoch of the lives among Ray's named actors (the latest, if there are two)."""
    epochs: dict[str, int] = {}
    stem = f"baton-{fleet}-"
    for entry in names:
        worker_id, _, epoch = entry["name"].removeprefix(stem).rpartition("-")
        role, _, index = worker_id.rpartition("-")
        ours = entry["namespace"] == NAMESPACE and entry["name"].startswith(stem)
        if ours and role in ("prefill", "decode") and index.isdigit() and epoch.isdigit():
            epochs[worker_id] = max(int(epoch), epochs.get(worker_id, 0))
    return epochs


def exit_reason(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name} ({-code})"
    except ValueError:
        return f"killed by signal {-code}"
