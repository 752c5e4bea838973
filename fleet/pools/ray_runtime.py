"""Ray for one fleet: a private local one, or an existing cluster."""

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from baton.config.fleet_file import EMBEDDED, FleetConfig
from baton.control_groups import usable_cpus
from baton.wire.grpc_options import NO_PROXY
from fleet.pools.nodes import CapacityError, check_nodes
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import (
    NAMESPACE,
    ControllerSpec,
    actor_name,
    actors_among,
    controller_name,
    local_cpus,
    worker_environment,
)
from fleet.pools.sealing import ray_token, seal
from fleet.process_key import ProcessKey

_DAEMONS = ("gcs_server", "raylet")  # a local Ray needs both
_NAME_FREE_LIMIT_S = 10.0
_START_LIMIT_S = 75.0  # for the controller's process on a busy machine
_CLUSTERS_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": loopback only, on Linux too
_FENCED_CALL = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_FENCE_LIMIT_S = 10.0
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum; Baton does not use it


@functools.cache
def process_token() -> str:
    """Return the token of every local Ray of this process: Ray's client reads it only once."""
    return secrets.token_hex(32)


def start_local(folder: Path, config: FleetConfig) -> dict[str, str]:
    """Start a private Ray in ``folder``, which needs a short path, and end it with this process.

    Must be called from the main thread. Returns the variables that its workers inherit.
    """
    # In the environment, so that daemons and workers inherit it.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray lowers the priority
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = process_token()  # otherwise Ray writes ~/.ray/auth_token
    os.environ.update(RAY_grpc_enable_http_proxy="0")
    os.environ.pop("RAY_USE_TLS", None)  # not needed on loopback
    os.environ[_CLUSTERS_VARIABLE] = "0"  # otherwise the daemons listen on all addresses
    import ray

    inherited = worker_environment(config.lanes[0])
    _without_helpers()
    with _set_for_children(inherited):
        ray.init(
            address="local",
            num_cpus=local_cpus(config, usable_cpus()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
            namespace=NAMESPACE,
            _temp_dir=str(folder),
        )
    insist_on_token(ray.get_runtime_context().gcs_address)
    return inherited


def _without_helpers() -> None:
    """Let Ray start only what one machine needs, which it has no settings for.

    Its autoscaler, log reader and API server take 1.1 CPU seconds of a start, and 220 MB.
    """
    from ray._private.node import Node

    for name in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, name, lambda node, **_: setattr(node, "_webui_url", ""))


@contextlib.contextmanager
def _set_for_children(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect(address: str, config: FleetConfig) -> str:
    """Connect to an existing cluster and check that it can run the fleet.

    Returns:
        The host that workers bind: loopback on one machine, ``""`` (each node's own) otherwise.

    Raises:
        CapacityError: The fleet does not fit, or its settings do not work on several nodes.
    """
    attach(address)
    import ray

    from fleet.pools.placement import cluster_nodes

    nodes = cluster_nodes()
    for lane in config.lanes:
        if lane.pools.bounds is None:
            check_nodes(lane, nodes)
    alone = {node.address for node in nodes} == {ray.util.get_node_ip_address()}
    if alone and config.cpus_total <= sum(node.cpus for node in nodes):
        return "127.0.0.1"
    if config.redis == EMBEDDED:
        raise CapacityError(
            "redis = embedded serves one machine only, but the cluster has or needs several: set "
            "`redis:` to the URL of a server that every node reaches"
        )
    if config.pools.tls is None and not config.pools.insecure:
        raise CapacityError(
            "workers on several nodes would send prompts, KV and the fleet token in plain text. "
            "Set `pools: {tls: {certificate: FILE, key: FILE, ca: FILE}}` (`baton certs DIR` makes "
            "them for trials), or allow it with `pools: {insecure: true}`"
        )
    if os.environ.get("RAY_AUTH_MODE") not in ("token", "disabled"):
        raise CapacityError(
            "this Ray cluster has no authentication: anyone who can reach it can run code on its "
            "nodes. Give it a token (`ray get-auth-token --generate`, copy ~/.ray/auth_token to "
            "every node, restart Ray), or set RAY_AUTH_MODE=disabled to accept that"
        )
    return ""


def attach(address: str) -> None:
    """Connect to an existing cluster.

    Raises:
        CapacityError: There is no cluster, or it rejects this process.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or ray_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray itself does so only for `auto`
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise CapacityError(f"cannot connect to Ray at {address}: {error}") from error
    if os.environ.get("RAY_AUTH_MODE") == "token":
        insist_on_token(ray.get_runtime_context().gcs_address)


def insist_on_token(address: str) -> None:
    """Check that the Ray at ``address`` refuses a call without its token.

    Raises:
        CapacityError: It accepts the call, or does not respond.
    """
    import grpc
    import ray

    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        files = (f"RAY_TLS_{name}" for name in ("CA_CERT", "SERVER_KEY", "SERVER_CERT"))
        ca, key, certificate = (Path(os.environ[file]).read_bytes() for file in files)
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        channel = grpc.secure_channel(address, credentials, options=[NO_PROXY])
    else:
        channel = grpc.insecure_channel(address, options=[NO_PROXY])
    with channel:
        try:
            channel.unary_unary(_FENCED_CALL, bytes, bytes)(b"", timeout=_FENCE_LIMIT_S)
            result = "accepted it"
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return
            result = f"returned {error.code().name}"
    raise CapacityError(
        f"Ray {ray.__version__} at {address} must refuse a call without a token, but {result}: "
        "anyone who can reach it could run code on its nodes. Run Ray 2.52 or newer on every node, "
        "started with RAY_AUTH_MODE=token"
    )


def health() -> RayHealth:
    """Start watching the local Ray that this process started."""
    import ray

    found = {c.name(): ProcessKey.of(c.pid) for c in psutil.Process().children()}
    daemons = {name: key for name, key in found.items() if name in _DAEMONS and key is not None}
    return RayHealth(ray.get_runtime_context().gcs_address, daemons)


def packed(spec: ControllerSpec) -> bytes:
    """Encode a specification for the controller, sealed if needed: it may have passwords."""
    text = msgspec.json.encode(spec).decode()
    return (seal(text) if spec.sealed else text).encode()


class Controller:
    """Handle of the fleet's controller actor. All calls block."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, fleet: str, spec: ControllerSpec) -> "Controller":
        """Start the detached controller on this node, which adopts existing workers.

        It is bound to the supervisor's node, so that the loss of a worker's node cannot end it.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from fleet.pools.ray_controller import ControllerActor

        here = ray.get_runtime_context().get_node_id()
        options = ray.remote(ControllerActor).options(
            name=controller_name(fleet),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        until_s = time.monotonic() + _NAME_FREE_LIMIT_S
        while True:
            try:
                actor = options.remote(packed(spec))
                break
            except ValueError:  # the name of an ended controller is not yet free
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.2)
        controller = cls(actor)
        controller.keep_running(_START_LIMIT_S)
        return controller

    @classmethod
    def find(cls, fleet: str) -> "Controller | None":
        """Return the fleet's controller, if the cluster has one."""
        import ray

        with contextlib.suppress(ValueError):
            return cls(ray.get_actor(controller_name(fleet), namespace=NAMESPACE))
        return None

    @classmethod
    def ensure(cls, fleet: str, spec: ControllerSpec) -> bool:
        """Make a controller with this specification run on this node, and keep the workers.

        A controller that has another specification, runs elsewhere or does not respond is replaced
        by one that adopts its workers.

        Returns:
            Whether the fleet existed: a controller, or workers without one.
        """
        import ray

        running = cls.find(fleet)
        if running is not None:
            if running.is_at_home_with(spec):
                running.keep_running()
                return True
            running.dismiss()
        names = ray.util.list_named_actors(all_namespaces=True)
        there = running is not None or bool(actors_among(names, fleet))
        cls.start(fleet, spec)
        return there

    def is_at_home_with(self, spec: ControllerSpec) -> bool:
        """Return whether it responds, runs on this node and has this specification."""
        import ray

        try:
            here, digest = ray.get(self._actor.identity.remote(), timeout=5.0)
        except ray.exceptions.RayError:
            return False
        return bool(here == ray.get_runtime_context().get_node_id() and digest == spec.digest)

    def dismiss(self) -> None:
        """End the controller, but not its workers."""
        import ray

        ray.kill(self._actor, no_restart=True)

    def keep_running(self, timeout_s: float = 30.0) -> None:
        """Start the controller's work, also after Ray has restarted the actor."""
        import ray

        ray.get(self._actor.run.remote(), timeout=timeout_s)

    def status(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """Return worker_id, phase, epoch, reason and node of each slot."""
        import ray

        slots: list[dict[str, Any]] = ray.get(self._actor.status.remote(), timeout=timeout_s)
        return slots

    def stop(self, limit_s: float = 6.0) -> bool:
        """Stop all workers, then the controller; return whether all workers stopped in time."""
        import ray

        try:
            return bool(ray.get(self._actor.stop.remote(limit_s), timeout=limit_s + 2.0))
        except ray.exceptions.RayError:
            return False  # its workers end with a local Ray, or in a later sweep
        finally:
            self.dismiss()


def clean(fleet: str) -> int:
    """End a fleet's controller, workers and placement groups in the cluster.

    Returns:
        Number of workers and groups that the controller did not end.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    from fleet.pools.placement import groups_of

    if (controller := Controller.find(fleet)) is not None:
        controller.stop()
    left = 0
    names = ray.util.list_named_actors(all_namespaces=True)
    for worker_id, epoch in actors_among(names, fleet):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor_name(fleet, worker_id, epoch), namespace=NAMESPACE))
            left += 1
    for group, *_ in groups_of(fleet).values():
        remove_placement_group(group)
        left += 1
    return left
