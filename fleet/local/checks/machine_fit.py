"""Checks whether this machine has what the processes of a fleet need that all run here."""

from collections.abc import Iterator

from baton.config.clients import KEYS_IN_REDIS
from baton.config.fleet_file import FleetConfig
from baton.control_groups import total_memory_bytes, usable_cpus
from baton.folders import read_small
from fleet.pools.resources import engine_settings
from fleet.ports import LEAST_PORTS, PORTS_OF_A_WORKER

_GIB = 1 << 30


def missing_files(config: FleetConfig) -> list[str]:
    """Return a line for each file of keys or certificates that cannot be read here."""
    keys = config.clients.api_keys_file
    named = {"clients.api_keys_file": keys} if keys and keys != KEYS_IN_REDIS else {}
    if (https := config.clients.tls) is not None:
        named |= {"clients.tls.certificate": https.certificate, "clients.tls.key": https.key}
    if (tls := config.pools.tls) is not None:
        named |= {
            "pools.tls.certificate": tls.certificate,
            "pools.tls.key": tls.key,
            "pools.tls.ca": tls.ca,
        }
    return [f"{name}: {problem}" for name, file in named.items() if (problem := _unreadable(file))]


def missing_resources(config: FleetConfig) -> list[str]:
    """Return a line for each resource that this machine lacks for all workers of the fleet."""
    lines = [line for lane in config.lanes for line in _missing(lane)]
    return list(dict.fromkeys([*_missing_ports(config), *lines]))


def _unreadable(file: str) -> str:
    try:
        read_small(file)
    except OSError as error:
        return f"cannot read {file}: {error.strerror}"
    return ""


def _missing_ports(config: FleetConfig) -> Iterator[str]:
    if config.pools.ports is None:
        return
    first, _, last = config.pools.ports.partition("-")
    ports = int(last) - int(first) + 1
    workers = sum(lane.pools.most_workers for lane in config.lanes)
    if ports < LEAST_PORTS * workers:
        yield (
            f"pools.ports: {config.pools.ports} has {ports} ports, but {workers} workers need "
            f"{LEAST_PORTS * workers} ({PORTS_OF_A_WORKER * workers} with KV by TCP)"
        )


def _missing(config: FleetConfig) -> Iterator[str]:
    cores = usable_cpus()
    if config.cpus_per_rank > cores:
        yield f"cpus_per_rank: {config.cpus_per_rank:g}, but this machine has {cores} CPUs"
    settings = engine_settings(config, "decode")
    if settings.emulated is not None or settings.external is not None:
        return
    if settings.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            yield "BATON_DEVICE is cuda, but torch finds no CUDA device on this machine"
    elif settings.kv_blocks:
        from baton.engine.loading.memory import kv_geometry
        from baton.model.artifact import resolve_model
        from baton.model.locate import HubSilentError

        try:
            model = resolve_model(config.model, hub_answers_s=0).config
        except HubSilentError:  # `describe_model` waits for the hub, and warns
            return
        pool = kv_geometry(model, settings.kv_dtype or settings.dtype, settings.kv_blocks)
        needed_bytes = config.pools.most_workers * pool.pool_bytes
        total_bytes = total_memory_bytes()
        if needed_bytes > total_bytes:
            yield (
                f"kv_blocks_per_worker: {settings.kv_blocks} blocks of {config.pools.most_workers} "
                f"workers need {needed_bytes / _GIB:.1f} GiB, but this machine has "
                f"{total_bytes / _GIB:.1f} GiB; `auto` takes what fits"
            )
