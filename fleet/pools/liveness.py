"""Detection of frozen worker processes, from outside by pings and from inside by a watchdog.

A process that is stopped, or whose event loop hangs, does not exit: its streams stay open and its
engine idles. The controller pings each worker every `ASK_EVERY_S`; after `FROZEN_AFTER_S` without a
response it ends the worker and starts the next one. A process that wakes up later may have been
replaced, unless the controller stood still too, as in a paused container or virtual machine:
`StandstillGuard` asks the registry, and ends a replaced one.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import psutil
import ray
from ray.exceptions import RayError

from baton.planner.state import WorkerState
from baton.registry.types import Role
from fleet.process_key import ProcessKey, end_at_once

_LOG = logging.getLogger("fleet.pools.liveness")

ASK_EVERY_S = 2.0
FROZEN_AFTER_S = 8.0
_ASK_STARTING_S = 0.5
_ASK_AGAIN_S = 1.0
_SLICE_S = 0.25  # time is counted in slices: if this process freezes, its clock stops too


class ReportedRole(msgspec.Struct, frozen=True):
    """Role of a worker, and the number of the turn that gave it."""

    role: Role
    turn: int = 0


class ShellProcess(msgspec.Struct, frozen=True):
    """Process that hosts an incarnation."""

    host: str
    key: ProcessKey
    epoch: int = 0  # of the incarnation; its actor may be named after an earlier one
    settings_digest: str = ""  # of the settings that it was started with
    started: bool = False
    turned: ReportedRole | None = None  # None: a worker of an earlier version
    load: WorkerState | None = None  # of a ready worker
    doing: str = ""  # while it starts


class Life:
    """The controller's view of one incarnation: its actor, its process and its last response.

    ``named`` is the epoch in the actor's name, 0 if unknown.
    """

    def __init__(self, epoch: int, actor: Any, named: int = 0) -> None:
        self.epoch = epoch
        self.actor = actor
        self.named = named
        self.on_answer: Callable[[ShellProcess], None] = lambda _: None
        self._process: ShellProcess | None = None
        self._silent_s = 0.0

    async def ask(self) -> None:
        """Ping the incarnation until cancelled; each response ends its silence."""
        while True:
            try:
                self._process = msgspec.msgpack.decode(
                    await self.actor.ping.remote(), type=ShellProcess
                )
                self._silent_s = 0.0
                self.on_answer(self._process)
            except RayError as error:  # after its end, the task that waits for it gets the error
                _LOG.debug("no response to a ping: %r", error)
            starts = self._process is None or not self._process.started
            await asyncio.sleep(_ASK_STARTING_S if starts else ASK_EVERY_S)

    @property
    def doing(self) -> str:
        """Return what it did at its last response, if it was starting."""
        return self._process.doing if self._process is not None else ""

    @property
    def load(self) -> WorkerState | None:
        """Load of the worker at its last response; None if it has not been ready."""
        return self._process.load if self._process is not None else None

    async def freeze(self) -> None:
        """Return once the incarnation has not responded for `FROZEN_AFTER_S`, counted from now."""
        self._silent_s = 0.0
        while self._silent_s < FROZEN_AFTER_S:
            await asyncio.sleep(_SLICE_S)
            self._silent_s += _SLICE_S

    def end(self) -> None:
        """Kill its processes; Ray alone cannot end a stopped one."""
        process = self._process
        if process is None:
            _end(self.actor, _process_here(self.actor))
        else:
            _end(self.actor, process.key if process.host == socket.gethostname() else None)


async def process_of(actor: Any) -> ShellProcess | None:
    """Return the process of a `WorkerActor`; None if it does not respond."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(ASK_EVERY_S):
            return msgspec.msgpack.decode(await actor.ping.remote(), type=ShellProcess)
    return None


def end_actor(name: str, namespace: str) -> None:
    """End a named actor, if it is still there."""
    with contextlib.suppress(ValueError, RayError):
        actor = ray.get_actor(name, namespace=namespace)
        _end(actor, _process_here(actor))


def _process_here(actor: Any) -> ProcessKey | None:
    """Return the process of a `WorkerActor` on this host, by Ray's table of actors."""
    with contextlib.suppress(RayError, psutil.Error):
        entry = ray._private.state.actors(actor._actor_id.hex())  # noqa: SLF001 - a developer API
        here = ray.get_runtime_context().get_node_id()
        key = ProcessKey.of(entry["Pid"]) if entry["Address"]["NodeID"] == here else None
        process = key.find() if key is not None else None
        if process is not None and "".join(process.cmdline()).startswith("ray::WorkerActor"):
            return key
    return None


def _end(actor: Any, here: ProcessKey | None) -> None:
    if here is not None:
        end_at_once(here)
    with contextlib.suppress(RayError):
        ray.kill(actor)


class StandstillGuard:
    """Watchdog that ends this process if it was replaced while it, or its event loop, hung.

    ``replaced`` is awaited in a thread, whose event loop runs while the other one hangs; it returns
    None if it cannot be known. Until it is known, the process serves.
    """

    def __init__(
        self,
        replaced: Callable[[], Coroutine[Any, Any, bool | None]],
        limit_s: float = FROZEN_AFTER_S,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._replaced = replaced
        self._limit_s = limit_s
        self._end = end or _end_this_process
        self._beat_s = time.monotonic()
        self._hung_s = 0.0  # the standstill about which the registry was not asked yet

    async def run(self) -> None:
        """Beat in the event loop, and watch the beat in a thread, which runs if the loop hangs."""
        self._beat_s = time.monotonic()
        stop = threading.Event()
        threading.Thread(target=self._watch, args=(stop,), daemon=True, name="standstill").start()
        try:
            while True:
                self._look()
                self._beat_s = time.monotonic()
                await asyncio.sleep(_SLICE_S)
        finally:
            stop.set()

    def _look(self) -> None:
        still_s = time.monotonic() - self._beat_s
        if still_s > self._limit_s:
            self._hung_s = still_s

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(_SLICE_S):
            self._look()
            if not (hung_s := self._hung_s):
                continue
            self._hung_s = 0.0
            answer = asyncio.run(self._replaced())
            if answer:
                self._end(f"hung for {hung_s:.1f} s: this worker has been replaced")
            elif answer is None:
                self._hung_s = self._hung_s or hung_s
                stop.wait(_ASK_AGAIN_S)


def _end_this_process(why: str) -> None:
    os.write(2, f"{why}\n".encode())
    faulthandler.dump_traceback(2, all_threads=True)
    os._exit(70)
