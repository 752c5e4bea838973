"""Worker pools on an existing Ray cluster, without depending on the cluster.

    main thread ── ClusterPools ── thread with an event loop:
                                     controller: pinged every 2 s, through Redis
                                     if silent: restarted by a child, `fleet.pools.cluster_call`

While Ray's head or the controller is down, workers and routers keep serving. The outage is
reported, and the controller is restarted as soon as possible.
"""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton.config.fleet_file import FleetConfig
from baton.registry.admin_commands import AdminCommands
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from fleet.local.fleet_redis import FleetRedis
from fleet.local.subprocesses import die_with_parent
from fleet.pools.cluster_call import REFUSED, ClusterCall, ClusterReply
from fleet.pools.nodes import CapacityError
from fleet.pools.resources import ControllerSpec, specs_of
from fleet.private_logs import open_log

_T = TypeVar("_T")

CALL_LIMIT_S = 90.0
_PING_EVERY_S = 2.0
_PING_LIMIT_S = 3.0
_SILENT_S = 6.0  # then the controller is looked up through Ray
_PAUSE_S = (5.0, 30.0)  # between two attempts: the first pause, the longest
_STOP_LIMIT_S = 8.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Ray cluster that runs the workers, by its address.

    ``take_over`` takes the fleet, with its workers, from another supervisor; ``leave`` keeps
    workers running after a stop.
    """

    address: str
    take_over: bool = False
    leave: bool = False


class ClusterPools:
    """Worker pools of one fleet on a cluster. All calls come from the main thread."""

    def __init__(self, config: FleetConfig, address: str, redis: FleetRedis, log: Path) -> None:
        self._config = config
        self._ray_address = address
        self._redis = redis
        self._log = log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name="cluster")
        self._tasks = BackgroundTasks("cluster pools")
        self._registry = Registry(redis.url, config.fleet)
        self._news: deque[str] = deque()
        self._spec: ControllerSpec | None = None
        self.adopted = False  # the fleet existed before this process, or has served
        self._ended: set[str] = set()  # lanes that no file names any more, and that still run
        self.address = ""  # of this node, as other nodes reach it

    def start(self, spec: ControllerSpec) -> None:
        """Start or adopt the controller on this node.

        Raises:
            CapacityError: The cluster cannot be reached or cannot hold the fleet.
        """
        self._spec = spec
        self._thread.start()
        replies = [self._call(self._ensure(lane), CALL_LIMIT_S + 5) for lane in self._specs()]
        self.address = replies[0].address
        self.adopted = any(reply.was_there for reply in replies)
        if self.adopted:
            self._news.append("the fleet is already running: adopting its workers")
        self._call(self._begin_watch(), 5.0)

    def change(self, config: FleetConfig, spec: ControllerSpec) -> None:
        """Apply another configuration; workers restart one by one.

        Raises:
            CapacityError: The fleet does not fit, or the cluster is unreachable; nothing changed.
        """
        before = self._config, self._spec
        earlier = self._specs().keys()
        self._config = config
        self._spec = spec
        try:
            for lane in self._specs():
                self._call(self._ensure(lane), CALL_LIMIT_S + 5)
        except (CapacityError, TimeoutError) as error:
            self._config, self._spec = before
            raise CapacityError(str(error)) from error
        for lane in self._specs().keys() - earlier:
            self._call(self._watch_lane(lane), 5.0)
        self._ended |= earlier - self._specs().keys()
        self._ended -= self._specs().keys()

    def retire(self) -> None:
        """Stop the workers of models that the configuration has no longer."""
        with contextlib.suppress(TimeoutError, RegistryUnavailableError):
            self._call(self._stop_lanes(self._ended), 10.0)
        self._ended = set()

    def slots(self) -> list[dict[str, Any]]:
        """Return worker_id, phase, epoch, reason and node of each slot that is known."""
        slots: list[dict[str, Any]] = []
        with contextlib.suppress(RegistryUnavailableError, TimeoutError):
            for lane in self._specs():
                asked = self._orders(lane).ask("slots", timeout_s=_PING_LIMIT_S)
                answer = self._call(asked, 10.0)
                slots += answer.data if answer is not None else []
        return slots

    def problem(self) -> str:
        """Return "": a lost cluster or controller is awaited."""
        return ""

    def news(self) -> list[str]:
        """Return the messages since the last call."""
        lines = []
        while self._news:
            lines.append(self._news.popleft())
        return lines

    def answers(self) -> bool:
        """Return True: this class restarts a silent controller itself, without a time limit."""
        return True

    def stop(self, *, leave: bool) -> None:
        """End the fleet, unless another supervisor has taken it over.

        Args:
            leave: Keep workers and controller running for the next `up`, if they existed before
                this process or have served under it.
        """
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError, RegistryUnavailableError):
            self._call(self._tasks.close(), 3.0)
        if self._redis.taken_by is None and not (leave and self.adopted):
            with contextlib.suppress(TimeoutError, RegistryUnavailableError):
                self._call(self._stop_lanes({*self._specs(), *self._ended}), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, _T], limit_s: float) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except BaseException:  # also on a signal: do not leave it running
            future.cancel()
            raise

    def _specs(self) -> dict[str, ControllerSpec]:
        return specs_of(self._config, self._spec) if self._spec is not None else {}

    def _orders(self, lane: str) -> AdminCommands:
        return AdminCommands(self._registry.of_lane(lane))

    async def _stop_lanes(self, lanes: Iterable[str]) -> None:
        asked = [self._orders(lane).ask("stop", timeout_s=_STOP_LIMIT_S) for lane in lanes]
        await asyncio.gather(*asked)

    async def _begin_watch(self) -> None:
        self._tasks.keep(ALIVE.run, "alive clock")
        for lane in self._specs():
            await self._watch_lane(lane)

    async def _watch_lane(self, lane: str) -> None:
        self._tasks.keep(partial(self._watch_controller, lane), "controller")

    async def _watch_controller(self, lane: str) -> None:
        """Ping a controller; while it is silent, look it up through Ray and restart it."""
        seen_ns = ALIVE.now_ns()
        pause_s = _PAUSE_S[0]
        silent = False
        while self._redis.taken_by is None and lane in {*self._specs(), *self._ended}:
            await asyncio.sleep(_PING_EVERY_S)
            if lane not in self._specs():
                continue
            try:
                answer = await self._orders(lane).ask("ping", timeout_s=_PING_LIMIT_S)
            except RegistryUnavailableError:
                seen_ns = ALIVE.now_ns()  # Redis is down; the controller may be well
                continue
            if answer is not None:
                if silent:
                    self._news.append("the controller responds again")
                seen_ns = ALIVE.now_ns()
                pause_s = _PAUSE_S[0]
                silent = False
                continue
            if ALIVE.now_ns() - seen_ns < _SILENT_S * 1e9:
                continue
            if not silent:
                silent = True
                self._news.append(
                    "warning: the controller does not respond; workers and routers keep serving, "
                    "but dead workers are not restarted; restarting the controller"
                )
            try:
                await self._ensure(lane)
                seen_ns = ALIVE.now_ns()
            except (CapacityError, TimeoutError) as error:
                self._news.append(f"warning: {error}; retrying")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def _ensure(self, lane: str) -> ClusterReply:
        spec = self._specs()[lane]
        call = ClusterCall(
            verb="ensure", address=self._ray_address, config_json=spec.config_json, spec=spec
        )
        return await asyncio.to_thread(call_cluster, call, self._log, CALL_LIMIT_S)


def call_cluster(call: ClusterCall, log: Path, limit_s: float = CALL_LIMIT_S) -> ClusterReply:
    """Make a call in a child process, and write Ray's output to ``log``."""
    with open_log(log) as stream:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "fleet.pools.cluster_call"],
            cwd="/",  # Ray's workers import from it, and the user's folder may shadow modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,  # Ctrl-C in a terminal must reach only the supervisor
            preexec_fn=die_with_parent(),
        )
    try:
        raw, _ = child.communicate(msgspec.json.encode(call), timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise CapacityError(
            f"Ray at {call.address}: `{call.verb}` timed out after {limit_s:g} s; see {log}"
        ) from None
    if child.returncode not in (0, REFUSED):
        raise CapacityError(f"Ray at {call.address}: `{call.verb}` failed; see {log}")
    reply = msgspec.json.decode(raw.splitlines()[-1], type=ClusterReply)
    if reply.problem:
        raise CapacityError(reply.problem)
    return reply
