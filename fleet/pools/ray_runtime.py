"""Ray for one fleet: a private local one that leaves nothing behind, or an existing cluster."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from config.fleet_file import EMBEDDED, FleetConfig
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import (
    NAMESPACE,
    CapacityError,
    check_capacity,
    controller_name,
    local_cpus,
)
from fleet.process_key import ProcessKey

_DAEMONS = ("gcs_server", "raylet")  # without one of them a local Ray is lost
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing of ours goes through it


def start_local(folder: Path, config: FleetConfig) -> None:
    """Start a private Ray below ``folder`` (short: socket paths end at 107 characters).

    Its daemons die with this process. Call from the main thread.
    """
    # In the environment, so that daemons and workers inherit it.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes ~/.ray/auth_token
    import ray

    ray.init(
        address="local",
        num_cpus=local_cpus(config, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace=NAMESPACE,
        _temp_dir=str(folder),
    )


def connect(address: str, config: FleetConfig) -> str:
    """Connect to an existing cluster and see whether the fleet fits.

    Returns:
        The host that workers bind: loopback on one machine, ``""`` (each node's own) otherwise.

    Raises:
        CapacityError: It does not fit, or nodes could not reach what this machine starts.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise CapacityError(f"no Ray cluster at {address}: {error}") from error
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_capacity(config, [node["Resources"].get("CPU", 0.0) for node in nodes])
    own_address = ray.util.get_node_ip_address()
    if {node["NodeManagerAddress"] for node in nodes} == {own_address}:
        return "127.0.0.1"
    if config.redis == EMBEDDED:
        raise CapacityError(
            "redis = embedded listens on this machine only, and the cluster has other nodes: set "
            "`redis:` to the URL of a server that every node reaches"
        )
    return ""


def health(*, local: bool) -> RayHealth:
    """Begin to watch the Ray that this process is connected to.

    Args:
        local: Whether this process started it.
    """
    import ray

    children = psutil.Process().children() if local else []
    found = {child.name(): ProcessKey.of(child.pid) for child in children}
    daemons = {name: key for name, key in found.items() if name in _DAEMONS and key is not None}
    return RayHealth(ray.get_runtime_context().gcs_address, daemons)


class Controller:
    """A handle to the fleet's controller actor, for the supervisor. All calls block."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, fleet: str, spec: msgspec.Struct) -> "Controller":
        """Start the detached controller; one that was left behind by an earlier `up` is ended."""
        import ray

        from fleet.pools.ray_controller import ControllerActor

        cls.end_leftover(fleet)
        actor = (
            ray.remote(ControllerActor)
            .options(
                name=controller_name(fleet),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
            )
            .remote(msgspec.json.encode(spec))
        )
        controller = cls(actor)
        controller.keep_running()
        return controller

    @classmethod
    def end_leftover(cls, fleet: str) -> None:
        """End a controller, and its workers, that outlived their supervisor."""
        import ray

        try:
            actor = ray.get_actor(controller_name(fleet), namespace=NAMESPACE)
        except ValueError:
            return
        cls(actor).stop()

    def keep_running(self, timeout_s: float = 30.0) -> None:
        """Make sure that it works; after Ray restarted the actor this sets it going again.

        Raises:
            ray.exceptions.RayError: It is gone, or did not answer in time.
        """
        import ray

        ray.get(self._actor.run.remote(), timeout=timeout_s)

    def status(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The slots: worker_id, phase, epoch, reason."""
        import ray

        slots: list[dict[str, Any]] = ray.get(self._actor.status.remote(), timeout=timeout_s)
        return slots

    def stop(self, limit_s: float = 6.0) -> bool:
        """End all workers, then the controller; whether the workers ended by themselves."""
        import ray

        ended = False
        try:
            ended = ray.get(self._actor.stop.remote(limit_s), timeout=limit_s + 2.0)
        except ray.exceptions.RayError:
            ended = False  # its workers die with a local Ray, and are swept up otherwise
        finally:
            ray.kill(self._actor)
        return ended


@contextmanager
def shut_down() -> Iterator[None]:
    """Disconnect at the end, which ends a Ray that this process started."""
    import ray

    try:
        yield
    finally:
        ray.shutdown()
