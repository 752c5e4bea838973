"""The pools of a fleet on a private Ray of this process, which ends with it."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from config.fleet_file import FleetConfig
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import ControllerSpec

_STOP_LIMIT_S = 5.0
_ANSWER_LIMIT_S = 2.0


class LocalPools:
    """See the module. All calls come from the main thread.

    Args:
        config: The fleet.
        folder: Of Ray's files and sockets; short.
    """

    def __init__(self, config: FleetConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._controller: Any = None
        self._health: RayHealth | None = None
        self._started = False
        self.address = "127.0.0.1"

    def start(self, spec: ControllerSpec) -> None:
        """Start Ray and the controller."""
        from fleet.pools import ray_runtime

        self._started = True
        ray_runtime.start_local(self._folder, self._config)
        self._health = ray_runtime.health()
        spec = msgspec.structs.replace(spec, host=self.address)
        self._controller = ray_runtime.Controller.start(self._config.fleet, spec)

    def change(self, config: FleetConfig, spec: ControllerSpec) -> None:
        """Go on with another configuration; workers follow one by one.

        Raises:
            CapacityError: It does not fit, and nothing has changed; or the controller does not
                answer.
        """
        from ray.exceptions import RayError

        from fleet.pools import ray_runtime
        from fleet.pools.nodes import CapacityError, check_nodes
        from fleet.pools.placement import cluster_nodes

        check_nodes(config, cluster_nodes())
        spec = msgspec.structs.replace(spec, host=self.address)
        try:
            ray_runtime.Controller.ensure(config.fleet, spec)
        except RayError as error:
            raise CapacityError(
                f"the controller does not begin with the new settings: {error}; see "
                "`baton logs controller`, then try again"
            ) from error
        finally:
            found = ray_runtime.Controller.find(config.fleet)
            self._controller = found or self._controller

    def slots(self) -> list[dict[str, Any]]:
        """worker_id, phase, epoch, reason of each slot; nothing while nobody answers."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            found: list[dict[str, Any]] = self._controller.status()
            return found
        return []

    def problem(self) -> str:
        """What ended Ray for good; empty if nothing did."""
        return self._health.problem() if self._health is not None else ""

    def news(self) -> list[str]:
        """What is to be told since the last call: nothing, here."""
        return []

    def answers(self) -> bool:
        """Whether the controller does; one that Ray has restarted is set going again."""
        from ray.exceptions import RayError

        try:
            self._controller.keep_running(timeout_s=_ANSWER_LIMIT_S)
        except RayError:
            return False
        return True

    def stop(self, *, leave: bool) -> None:
        """End the workers, then Ray.

        Args:
            leave: What is asked of pools on a cluster; nothing outlives this Ray.
        """
        lost = bool(self.problem())
        if self._health is not None:
            self._health.close()
        if not self._started or lost:
            return  # what would go through a lost Ray would wait for it: a sweep ends them all
        import ray

        if self._controller is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                self._controller.stop(_STOP_LIMIT_S)
        ray.shutdown()
