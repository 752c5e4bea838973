"""Worker pools on a private Ray, which ends with this process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.engine.process.own_process import SOCKET_VARIABLE, EarlyEngine
from baton.registry.types import Role, worker_name
from baton.types.lanes import worker_prefix
from baton.types.trust import TrustRules
from fleet.local.subprocesses import die_with_parent
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import ControllerSpec, engine_settings, specs_of, worker_environment
from fleet.private_logs import open_log

_STOP_LIMIT_S = 5.0
_ANSWER_LIMIT_S = 2.0
_LOOKS = 4  # without a response in a row; the supervisor ends the fleet after 30 s


class LocalPools:
    """Worker pools of one fleet on a private Ray. All calls come from the main thread.

    ``folder`` gets Ray's files and sockets, and needs a short path.
    """

    def __init__(self, config: FleetConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._controllers: dict[str, Any] = {}  # by the lane's name in Ray
        self._health: RayHealth | None = None
        self._inherited: dict[str, str] = {}
        self._started = False
        self._engines: subprocess.Popen[bytes] | None = None  # parent of the first workers'
        self._specs: dict[str, ControllerSpec] = {}
        self._silent_looks = 0  # in a row
        self._news: list[str] = []
        self.adopted = False  # a private Ray always starts empty
        self.address = "127.0.0.1"

    def start(self, spec: ControllerSpec) -> None:
        """Start the first workers' engines, beside them Ray, and the controller of each lane.

        Raises:
            CapacityError: Ray or the controller failed to start.
        """
        from fleet.pools import ray_runtime

        self._started = True
        specs = self._specs_here(self._config, spec)
        folder = self._folder.parent
        self._engines = start_engines(self._config, specs, folder, Path(spec.log_dir))
        try:
            # The first import of `ray`, which then reads its authentication mode.
            self._inherited = ray_runtime.start_local(self._folder, self._config)
        except Exception as error:  # Ray raises no narrower type
            raise _no_start("Ray", error) from error
        from ray.exceptions import RayError

        self._health = ray_runtime.health()
        self._specs = self._specs_here(self._config, spec)
        try:
            for lane, of_lane in self._specs.items():
                self._controllers[lane] = ray_runtime.Controller.start(lane, of_lane)
        except RayError as error:
            raise _no_start("the controller", error) from error

    def change(self, config: FleetConfig, spec: ControllerSpec) -> None:
        """Apply another configuration; workers restart one by one.

        Raises:
            CapacityError: The fleet does not fit, and nothing changed; or the controller does not
                respond.
        """
        from ray.exceptions import RayError

        from fleet.pools import ray_runtime
        from fleet.pools.nodes import CapacityError, check_nodes
        from fleet.pools.placement import cluster_nodes

        nodes = cluster_nodes()
        for each in config.lanes:
            check_nodes(each, nodes)
        cpus = sum(node.cpus for node in nodes)
        if len(config.lanes) > 1 and config.cpus_total > cpus:  # each alone has room
            raise CapacityError(
                f"the models need {config.cpus_total:g} CPUs together, the running fleet has "
                f"{cpus:g}: lower cpus_per_rank or pools, or stop and start the fleet"
            )
        specs = self._specs_here(config, spec)
        for lane, of_lane in specs.items():
            try:
                ray_runtime.Controller.ensure(lane, of_lane)
            except RayError as error:
                raise CapacityError(
                    f"the controller did not start with the new settings: {error}; see "
                    "`baton logs controller`, then retry"
                ) from error
            else:
                self._specs[lane] = of_lane
            finally:
                if (controller := ray_runtime.Controller.find(lane)) is not None:
                    self._controllers[lane] = controller
        self._config = config

    def _specs_here(self, config: FleetConfig, spec: ControllerSpec) -> dict[str, ControllerSpec]:
        here = msgspec.structs.replace(spec, host=self.address, inherited=self._inherited)
        return specs_of(config, here)

    def retire(self) -> None:
        """Stop the workers of models that the configuration has no longer."""
        wanted = {one.fleet for one in self._config.lanes}
        for lane in self._controllers.keys() - wanted:
            self._specs.pop(lane, None)
            _stop(self._controllers.pop(lane))

    def slots(self) -> list[dict[str, Any]]:
        """Return worker_id, phase, epoch, reason and node of each slot that is known."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            return [
                slot for controller in self._controllers.values() for slot in controller.status()
            ]
        return []

    def problem(self) -> str:
        """Return the reason if Ray is lost; empty otherwise."""
        return self._health.problem() if self._health is not None else ""

    def news(self) -> list[str]:
        """Return the messages since the last call."""
        lines = self._news
        self._news = []
        return lines

    def answers(self) -> bool:
        """Return whether the controller responds, and repair one that does not.

        A controller that Ray has restarted resumes its work. One that hangs is replaced by a
        successor that adopts the workers, which serve meanwhile.
        """
        from ray.exceptions import RayError

        silent = ""
        try:
            for lane, controller in self._controllers.items():
                silent = lane
                controller.keep_running(timeout_s=_ANSWER_LIMIT_S)
        except RayError:
            self._silent_looks += 1
        else:
            self._silent_looks = 0
            return True
        # Without Ray's head the calls below block for a minute, then end this process.
        if self._silent_looks % _LOOKS == 0 and self._health is not None and self._health.answers:
            self._news.append(
                "the controller does not respond; starting another, which adopts the workers"
            )
            with contextlib.suppress(RayError):
                self._replace_controller(silent)
                return True
        return False

    def _replace_controller(self, lane: str) -> None:
        from fleet.pools import ray_runtime

        if lane in self._specs:
            ray_runtime.Controller.ensure(lane, self._specs[lane])
            if (controller := ray_runtime.Controller.find(lane)) is not None:
                self._controllers[lane] = controller

    def stop(self, *, leave: bool) -> None:
        """End the workers, then Ray; ``leave`` is ignored, as nothing can outlive a private Ray."""
        try:
            self._stop_ray()
        finally:
            if self._engines is not None:  # usually gone, with the last engine
                self._engines.kill()
                self._engines.wait()

    def _stop_ray(self) -> None:
        lost = bool(self.problem())
        if self._health is not None:
            self._health.close()
        if not self._started or lost:
            return  # calls to a lost Ray would block; a sweep ends the processes
        import ray

        with ThreadPoolExecutor(max(len(self._controllers), 1)) as pool:
            list(pool.map(_stop, self._controllers.values()))
        ray.shutdown()


def _stop(controller: Any) -> None:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):
        controller.stop(_STOP_LIMIT_S)


def _no_start(what: str, error: Exception) -> Exception:
    from fleet.pools.nodes import CapacityError

    return CapacityError(
        f"{what} failed to start: {error}; see `baton logs controller`, `baton logs ray` and "
        "`baton doctor`, then retry"
    )


def start_engines(
    config: FleetConfig, specs: Mapping[str, ControllerSpec], run_folder: Path, logs: Path
) -> "subprocess.Popen[bytes] | None":
    """Start the engines of the first workers beside Ray, which leaves the CPUs idle meanwhile.

    The workers take them (``baton.engine.process.early_engines``). Whatever a worker finds no
    engine for, it starts itself, as after every death.

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
