"""Process ``vllm serve`` of one worker: its command, its start, and the properties it reports."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from baton.config.network import is_loopback
from baton.engine.parent import die_with_parent
from baton.engine.remote.http import HttpOrigin
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.engine.vllm.facts import VllmFacts, facts_of, hand_off_id
from baton.types.errors import InternalError, UnavailableError

_INSIDE = Path(__file__).parent / "inside"
_POLL_S = 0.2
_PROGRESS_S = 5.0
GENERATIONS = "generations"
"""File of vLLM's folder with the generation of each page, see ``staging.py``."""

SAVES = "saves"
"""Socket in vLLM's folder that receives reports of saved pages, see ``staging.py``."""

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_LOGPROBS = 21  # the 20 alternatives of a client, and the sampled token


def command(
    engine: ExternalEngine, settings: EngineSettings, model: Path, folder: Path, pool: str = ""
) -> list[str]:
    """Return the command line; the arguments of the fleet file come last and win.

    ``pool`` is a path at which vLLM can open the worker's KV pool.
    """
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }
    limits: list[str] = []
    if settings.max_context_tokens:
        limits = ["--max-model-len", str(settings.max_context_tokens)]
    return [
        engine.python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        *("--uds", f"{folder}/http"),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *("--kv-events-config", msgspec.json.encode(events).decode()),
        *("--scheduling-policy", "priority"),
        *("--structured-outputs-config.backend", "guidance"),
        *("--max-logprobs", str(_LOGPROBS)),
        *("--worker-extension-cls", "baton_worker.RewindingWorker"),
        *("--max-num-seqs", str(settings.max_batch_requests)),
        *_hand_off_arguments(engine, folder, pool),
        *_tier_arguments(settings.kv_tiers.memory_mb),
        *limits,
        *engine.args,
    ]


def _hand_off_arguments(engine: ExternalEngine, folder: Path, pool: str) -> list[str]:
    """Return the arguments of the connector."""
    if not engine.hand_off:
        return []
    connector: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "baton_nixl",
        "kv_role": _KV_ROLES.get(engine.role, "kv_both"),
        "kv_load_failure_policy": "fail",  # Baton repeats the hand-off, or lets vLLM compute
    }
    if engine.hand_off == "baton":
        connector["kv_connector"] = "BatonConnector"
        connector["kv_role"] = "kv_both"  # prefixes are pulled from workers of either role
        connector["kv_connector_module_path"] = "baton_kv"
        files = {name: f"{folder}/{name}" for name in ("order", GENERATIONS, SAVES)}
        connector["kv_connector_extra_config"] = {"pool": pool, **files}
    return ["--kv-transfer-config", msgspec.json.encode(connector).decode()]


def _tier_arguments(memory_mb: int) -> list[str]:
    """Return the arguments of vLLM's connector between GPU and host memory."""
    if not memory_mb:
        return []
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": memory_mb << 20,
            "offload_prompt_only": False,  # responses are prefixes of later turns
        },
    }
    return ["--kv-transfer-config", msgspec.json.encode(connector).decode()]


def _hand_off_environment(engine: ExternalEngine) -> dict[str, str]:
    """Return the addresses at which other vLLMs reach the KV."""
    if engine.hand_off != "nixl":
        return {}
    host, _, port = engine.address.rpartition(":")
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host.strip("[]"),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": port,
    }
    if is_loopback(host):
        variables["UCX_NET_DEVICES"] = "lo"  # UCX would listen on all interfaces
    if engine.ports:
        variables["UCX_TCP_PORT_RANGE"] = engine.ports
    return variables


def environment(outer: Mapping[str, str], threads: int, engine: ExternalEngine) -> dict[str, str]:
    """Return the environment; variables of the outer one win."""
    path = [str(_INSIDE), *outer.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **_hand_off_environment(engine),
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers would bind the same cores
        "OMP_NUM_THREADS": str(threads),
        **({"VLLM_BATCH_INVARIANT": "1"} if engine.batch_invariant else {}),
        **outer,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),  # our connectors and extension
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if engine.adapters else {}),
        "VLLM_SERVER_DEV_MODE": "1",  # serves /server_info and /reset_prefix_cache
    }


async def start(
    arguments: Sequence[str], threads: int, engine: ExternalEngine
) -> asyncio.subprocess.Process:
    """Start the server in this process's group; it ends with this process.

    Raises:
        InternalError: The interpreter cannot be executed.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
            env=environment(_own_environment(), threads, engine),
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise InternalError(
            f"cannot execute {arguments[0]}: {error.strerror}; set pools.vllm.python to an "
            "interpreter with vLLM"
        ) from None


def _own_environment() -> dict[str, str]:
    """Return this process's environment without what only its own interpreter may read.

    Nor does vLLM get ``VLLM_PORT=tcp://…``, which Kubernetes sets for a Service named ``vllm``.
    """
    own = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    if "://" in os.environ.get("VLLM_PORT", ""):
        own.add("VLLM_PORT")
    return {name: value for name, value in os.environ.items() if name not in own}


async def until_healthy(
    process: asyncio.subprocess.Process, origin: HttpOrigin, progress: Callable[[str], None]
) -> None:
    """Wait until the server takes requests; ``progress`` receives a line now and then.

    Raises:
        InternalError: The server exited.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    due_s = 0.0
    while True:
        if process.returncode is not None:
            raise InternalError(
                f"`vllm serve` exited with code {process.returncode}; see the worker's engine log"
            )
        try:
            await origin.fetch("GET", "/health", 2.0)
        except UnavailableError:
            waited_s = loop.time() - began_s
            if waited_s >= due_s:
                progress(f"vLLM is starting, {waited_s:.0f} s")
                due_s = waited_s + _PROGRESS_S
            await asyncio.sleep(_POLL_S)
        else:
            return


def origin_in(folder: str) -> HttpOrigin:
    """Return the server of a vLLM that was started with this folder."""
    return HttpOrigin.of_socket(f"{folder}/http")


async def read_facts(folder: str, hand_off: str = "") -> VllmFacts:
    """Return the properties of the running server, which was started with a ``hand_off``.

    Raises:
        InternalError: This version of vLLM does not report them as expected.
    """
    origin = origin_in(folder)
    version = msgspec.json.decode(await origin.fetch("GET", "/version", 10.0))["version"]
    raw = await origin.fetch("GET", "/server_info?config_format=json", 60.0)
    try:
        facts = facts_of(version, msgspec.json.decode(raw))
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(
            f"vLLM {version} does not report its configuration as 0.32 does: {error!r}"
        ) from None
    way = hand_off_id(hand_off, facts.block_tokens, facts.width)
    if hand_off == "baton":
        way += f"/{(Path(folder) / 'order').read_text()}"
    return msgspec.structs.replace(facts, hand_off=way)
