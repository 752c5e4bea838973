"""A worker program small enough for tests: a real process tree and registration, no model."""

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.planner.state import WorkerState
from baton.registry.redis_store import Registry
from baton.registry.types import Role, WorkerRecord
from baton.registry.workers import Presence
from fleet.local.subprocesses import die_with_parent


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    role: Role
    epoch: int
    turn: int = 0
    fleet: str
    redis_url: str
    host: str
    log_dir: str
    rank_addresses: tuple[str, ...] = ()


class Worker:
    def __init__(self, engine: asyncio.subprocess.Process, presence: Presence) -> None:
        self._engine = engine
        self._presence = presence
        self._closed = asyncio.Event()
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._watch_engine())

    @classmethod
    async def start(
        cls, settings: WorkerSettings, *, on_progress: Callable[[str], None]
    ) -> "Worker":
        while (Path(settings.log_dir) / f"slow-{settings.worker_id}").exists():
            on_progress("waiting for the end of a file")
            await asyncio.sleep(0.1)
        if (Path(settings.log_dir) / f"fail-{settings.worker_id}").exists():
            raise RuntimeError("told to fail")
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(600)", preexec_fn=die_with_parent()
        )
        record = WorkerRecord(
            worker_id=settings.worker_id,
            role=settings.role,
            state="ready",
            epoch=settings.epoch,
            turn=settings.turn,
            incarnation=secrets.token_bytes(16),
            pid=engine.pid,
            host=os.environ["OMP_WAIT_POLICY"],  # shows that the environment was in place
            address=f"{settings.host}:{os.getpid()}",
            metrics_address=" ".join(settings.rank_addresses),  # it has no page
            threads=int(os.environ["OMP_NUM_THREADS"]),
            reason=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        )
        presence = Presence(Registry(settings.redis_url, settings.fleet), record)
        presence.start()
        return cls(engine, presence)

    @property
    def record(self) -> WorkerRecord:
        return self._presence.record

    def load(self) -> WorkerState:
        record = self.record
        return WorkerState(worker_id=record.worker_id, role=record.role, steps=0)

    async def _watch_engine(self) -> None:
        code = await self._engine.wait()
        if not self._done.done():
            self._done.set_result(code)
        await self._presence.stop()
        self._closed.set()

    async def closed(self) -> None:
        await self._closed.wait()

    async def wait(self) -> int:
        return await self._done

    async def drain(self, timeout_s: float) -> bool:
        self._presence.update("draining")
        await asyncio.sleep(0.1)
        return True

    async def change_role(self, role: Role, number: int) -> None:
        self._presence.change_role(role, number)

    async def stop(self) -> None:
        await self._presence.stop()
        self._engine.kill()
        if not self._done.done():
            self._done.set_result(0)
