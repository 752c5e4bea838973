"""The pools of a fleet on a private Ray of this process, which ends with it."""

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from baton.config.fleet_file import FleetConfig
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import ControllerSpec

_STOP_LIMIT_S = 5.0
_ANSWER_LIMIT_S = 2.0
_LOOKS = 4  # in a row without an answer; the supervisor ends a fleet after 30 s without one


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
        self._spec: ControllerSpec | None = None
        self._silent_looks = 0  # in a row
        self._news: list[str] = []
        self.adopted = False  # a private Ray has nothing from before
        self.address = "127.0.0.1"

    def start(self, spec: ControllerSpec) -> None:
        """Start Ray and the controller.

        Raises:
            CapacityError: One of them does not start.
        """
        from fleet.pools import ray_runtime

        self._started = True
        spec = msgspec.structs.replace(spec, host=self.address)
        try:
            # The first import of `ray`, which reads then how it shall authenticate itself.
            ray_runtime.start_local(self._folder, self._config)
        except Exception as error:  # Ray raises just that
            raise _no_start("Ray", error) from error
        from ray.exceptions import RayError

        self._health = ray_runtime.health()
        self._spec = spec
        try:
            self._controller = ray_runtime.Controller.start(self._config.fleet, spec)
        except RayError as error:
            raise _no_start("the controller", error) from error

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
        else:
            self._spec = spec
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
        """What is to be told since the last call."""
        told = self._news
        self._news = []
        return told

    def answers(self) -> bool:
        """Whether the controller does.

        One that Ray has restarted is set going again. One that is frozen, or caught somewhere, is
        replaced by one that adopts its workers, which serve on meanwhile.
        """
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            self._controller.keep_running(timeout_s=_ANSWER_LIMIT_S)
            self._silent_looks = 0
            return True
        self._silent_looks += 1
        # Without Ray's head the calls below would wait for a minute, and end this process.
        if self._silent_looks % _LOOKS == 0 and self._health is not None and self._health.answers:
            self._news.append("the controller does not answer; starting another, which adopts all")
            with contextlib.suppress(RayError):
                self._replace_controller()
                return True
        return False

    def _replace_controller(self) -> None:
        from fleet.pools import ray_runtime

        if self._spec is not None:
            ray_runtime.Controller.ensure(self._config.fleet, self._spec)
            self._controller = ray_runtime.Controller.find(self._config.fleet)

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


def _no_start(what: str, error: Exception) -> Exception:
    from fleet.pools.nodes import CapacityError

    return CapacityError(
        f"{what} does not start: {error}; see `baton logs controller` and `baton logs ray`, then "
        "try again; `baton doctor` shows what this host lacks"
    )
