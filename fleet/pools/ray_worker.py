"""The Ray actor around one worker, whose engine is a child of this process.

A worker ends with its engine. If it was healthy, its actor hosts the slot's next worker in the same
process, which saves a start of Python and the imports; else the actor ends too.
"""

import asyncio
import gc
import importlib
import socket
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.registry.types import Role
from baton.registry.workers import was_replaced
from baton.telemetry.tasks import BackgroundTasks
from fleet.pools.liveness import ReportedRole, ShellProcess, StandstillGuard
from fleet.pools.ray_process import log_to, on_this_node
from fleet.pools.resources import settings_digest
from fleet.pools.sealing import unsealed
from fleet.process_key import ProcessKey

if TYPE_CHECKING:
    from fleet.worker.worker import Worker

_CLOSING_LIMIT_S = 3.0  # for the end of one worker before the next one starts


class WorkerActor:
    """Actor that hosts the ``Worker`` of a module; the controller makes it remote.

    The settings are fields of the module's ``WorkerSettings``, with sealed or plain secrets; an
    empty ``host`` means this node's address.
    """

    def __init__(self, program: str, settings: Mapping[str, Any]) -> None:
        log_file = Path(settings["log_dir"]) / f"{settings['worker_id']}.log"
        named = {"fleet": settings["fleet"], "worker": settings["worker_id"]}
        log_to(log_file, settings.get("log_format", "text"), **named)
        module = importlib.import_module(program)
        self._settings_type: type[Any] = module.WorkerSettings
        self._take(settings)
        self._start_worker: Callable[..., Coroutine[Any, Any, Worker]] = module.Worker.start
        self._tasks = BackgroundTasks("worker's actor")
        self._starting: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._started = asyncio.Event()
        self._worker: Worker | None = None
        self._guard: asyncio.Task[None] | None = None
        self._doing = ""  # while it starts

    async def start(self) -> bytes:
        """Start the worker unless it is starting; return its record as msgpack once it is ready.

        Controllers that adopt it call this, too: the one before may have died before its call.

        Raises:
            RuntimeError: ``stop`` was called before the worker was ready.
        """
        if self._starting is None:
            self._starting = self._tasks.vital(
                self._begin(), "start", partial(setattr, self, "_failure")
            )
        await asyncio.wait((self._starting,))
        if self._failure is not None:
            raise self._failure
        if self._worker is None:
            raise RuntimeError("the worker was stopped before it was ready")
        return msgspec.msgpack.encode(self._worker.record)

    async def _begin(self) -> None:
        self._worker = await self._start_worker(
            self._settings, on_progress=partial(setattr, self, "_doing")
        )
        self._doing = ""
        if self._guard is None:
            self._guard = self._tasks.keep(StandstillGuard(self._replaced).run, "standstill")
        self._started.set()

    async def _replaced(self) -> bool | None:
        own = self._settings
        return await was_replaced(own.redis_url, own.fleet, own.worker_id, own.epoch)

    async def begin_next_life(self, settings: Mapping[str, Any]) -> bytes:
        """Start the slot's next worker once the last one has closed, and return its record."""
        async with asyncio.timeout(_CLOSING_LIMIT_S):
            await self._running().closed()
        self._started.clear()
        self._starting = None
        self._worker = None
        gc.collect()  # remaining references would keep the last KV pool's memory
        self._take(settings)
        return await self.start()

    def _take(self, settings: Mapping[str, Any]) -> None:
        fields = unsealed(settings)
        self._settings = msgspec.convert(on_this_node(fields), self._settings_type)
        self._digest = settings_digest(fields)
        self._turned = ReportedRole(fields["role"], fields.get("turn", 0))

    async def ping(self) -> bytes:
        """Return this process and its epoch as msgpack; a frozen process does not respond."""
        started = self._started.is_set()
        turned = self._turned
        load = None
        if self._worker is not None:
            turned = ReportedRole(self._worker.record.role, self._worker.record.turn)
            load = self._worker.load()
        own = ShellProcess(
            host=socket.gethostname(),
            key=ProcessKey.own(),
            epoch=self._settings.epoch,
            settings_digest=self._digest,
            started=started,
            turned=turned,
            load=load,
            doing=self._doing,
        )
        return msgspec.msgpack.encode(own)

    async def wait(self) -> int:
        """Wait for the worker's exit code."""
        return await self._running().wait()

    async def drain(self, timeout_s: float) -> None:
        """Wait until other workers have resumed its requests."""
        await self._running().drain(timeout_s)

    async def change_role(self, role: Role, number: int) -> None:
        """Give the worker another role."""
        await self._running().change_role(role, number)

    async def stop(self) -> None:
        """Stop the worker, ready or not; the controller ends this process."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        else:
            await self._running().stop()

    def _running(self) -> "Worker":
        if self._worker is None:
            raise RuntimeError("the worker has not been started")
        return self._worker
