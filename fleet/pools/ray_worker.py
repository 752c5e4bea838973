"""The Ray actor around one worker: one life of one slot. The engine is a child of this process."""

import asyncio
import faulthandler
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from registry.types import WorkerRecord

WORKER_PROGRAM = "fleet.worker"  # the module with `Worker` and `WorkerSettings`
_LOG_LIMIT_BYTES = 16 * 2**20  # looked at when a life begins; one older file is kept


class WorkerProgram(Protocol):
    """What a worker program must offer."""

    async def start(self) -> WorkerRecord:
        """Load, register, serve."""

    async def wait(self) -> int:
        """The exit code, once the engine died or a stop was asked for."""

    async def drain(self, timeout_s: float) -> bool:
        """Move all requests away; whether none was left."""

    async def stop(self) -> None:
        """End, and leave the registry."""


class WorkerActor:
    """Wraps a worker program; made remote by the controller.

    Args:
        program: Module that has ``Worker`` and ``WorkerSettings``.
        settings: Fields of ``WorkerSettings``; an empty ``host`` means this node's address.
    """

    def __init__(self, program: str, settings: Mapping[str, Any]) -> None:
        fields = dict(settings)
        if not fields["host"]:
            import ray

            fields["host"] = ray.util.get_node_ip_address()
        log_to(Path(fields["log_dir"]) / f"{fields['worker_id']}.log")
        module = importlib.import_module(program)
        self._settings = msgspec.convert(fields, module.WorkerSettings)
        self._make: Callable[[Any], WorkerProgram] = module.Worker
        self._started = asyncio.Event()
        self._worker: WorkerProgram | None = None
        self._record: WorkerRecord | None = None

    async def start(self) -> bytes:
        """Start the worker; its record, as msgpack."""
        self._worker = self._make(self._settings)  # here, because it needs a running loop
        self._record = await self._worker.start()
        self._started.set()
        return msgspec.msgpack.encode(self._record)

    async def record(self) -> bytes:
        """The record, once it has started. For a controller that was restarted."""
        await self._started.wait()
        return msgspec.msgpack.encode(self._record)

    async def wait(self) -> int:
        """The worker's exit code."""
        return await self._running().wait()

    async def drain(self, timeout_s: float) -> None:
        """Move its requests away."""
        await self._running().drain(timeout_s)

    async def stop(self) -> None:
        """End the worker; this process is ended by the controller."""
        await self._running().stop()

    def _running(self) -> WorkerProgram:
        if self._worker is None:
            raise RuntimeError("the worker has not been started")
        return self._worker


def log_to(file: Path) -> None:
    """Send this process' output, its children's, and crash dumps to one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > _LOG_LIMIT_BYTES:
        file.replace(file.with_suffix(".log.1"))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    faulthandler.enable(file=2, all_threads=True)
    layout = f"%(asctime)s {os.getpid()} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=layout, force=True)
