"""Start of the first workers' engines beside Ray, which leaves the CPUs idle for half of its start.

The workers take them (``baton.engine.process.early_engines``). Whatever a worker finds no engine
for, it starts itself, as after every death.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.engine.process.taken_engine import SOCKET_VARIABLE, EarlyEngine
from baton.registry.types import Role, worker_name
from baton.types.lanes import worker_prefix
from baton.types.trust import TrustRules
from fleet.local.subprocesses import die_with_parent
from fleet.pools.resources import ControllerSpec, engine_settings, worker_environment
from fleet.private_logs import open_log


def start_engines(
    config: FleetConfig, specs: Mapping[str, ControllerSpec], run_folder: Path, logs: Path
) -> "subprocess.Popen[bytes] | None":
    """Start the engines of the first workers, by the specifications of the controllers.

    Returns their parent process, with which they end; None if there are none to start.
    """
    early = [each for lane in config.lanes for each in _engines(lane, specs[lane.fleet], logs)]
    if not early:
        return None
    path = run_folder / "engines"
    os.environ[SOCKET_VARIABLE] = str(path)  # inherited by Ray's workers
    with open_log(logs / "engines.log") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.engine.process.early_engines", str(path)],
            env={**os.environ, **worker_environment(config.lanes[0])},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in a terminal must reach only the supervisor
            preexec_fn=die_with_parent(),
        )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(msgspec.json.encode(early))
    return process


def _engines(lane: FleetConfig, spec: ControllerSpec, logs: Path) -> Iterator[EarlyEngine]:
    if lane.gates.trust() != TrustRules():
        return  # the model is checked before it is loaded
    pools = lane.pools
    for number in range(pools.prefill + pools.decode):
        worker_id = worker_name(number, worker_prefix(lane.fleet))
        role: Role = "prefill" if number < pools.prefill else "decode"
        settings = engine_settings(lane, role, worker_id, spec.other_workers)
        if settings.steps_on_cpu and settings.tensor_parallel == 1:
            settings = settings.on(len(os.sched_getaffinity(0)))
            yield EarlyEngine(settings, str(logs / f"{worker_id}.engine.log"))
