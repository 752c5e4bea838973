"""The worker shell's connection to a step-loop process: start, commands, reports."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import IO

import msgspec

from baton.engine.core.split import rank_geometries
from baton.engine.ipc import control_sockets, map_pool, pool_file
from baton.engine.process import messages
from baton.engine.process.own_process import EngineThread, TakenEngine, take_engine
from baton.engine.settings import ENGINE_MODULES, EngineSettings
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import InternalError

_LOG = logging.getLogger(__name__)

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11 does not name it
_DRAIN_S = 2.0  # to read the last reports after the process ended

EngineProcess = asyncio.subprocess.Process | EngineThread | TakenEngine
OnReport = Callable[[messages.Report], None]


class ReportInbox:
    """Reader of an engine's reports: handles those about loading and passes on the others."""

    def __init__(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self.fatal = ""  # message of a ``Fatal`` report
        self.ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress
        self._reader = messages.report_reader()
        self._received_ns = ALIVE.now_ns()
        self._early: list[messages.Report] = []  # received before ``listen``
        self._listener: OnReport = self._early.append

    def listen(self, listener: OnReport) -> None:
        """Pass all reports to ``listener``, in order."""
        self._listener = listener
        for report in self._early:
            listener(report)
        self._early.clear()

    def feed(self, data: bytes) -> None:
        """Process bytes from the engine, report by report."""
        for report in self._reader.feed(data):
            match report:
                case messages.LoadProgress():
                    self._received_ns = ALIVE.now_ns()
                    self._on_progress(report.what)
                case messages.Ready():
                    if not self.ready.done():
                        self.ready.set_result(report)
                case messages.Fatal():
                    self.fatal = report.message
                case _:
                    self._listener(report)

    def exited(self, code: int) -> None:
        """Fail ``ready`` after the process has exited."""
        if not self.ready.done():
            self.ready.set_exception(
                InternalError(self.fatal or f"the engine process exited with code {code}")
            )
            self.ready.exception()  # marks it as retrieved if nothing awaits it

    async def until_ready(self, timeout_s: float) -> messages.Ready:
        """Return ``Ready``, or raise ``InternalError`` after ``timeout_s`` without reports."""
        self._received_ns = ALIVE.now_ns()
        while (left_s := timeout_s - (ALIVE.now_ns() - self._received_ns) / 1e9) > 0:
            done, _ = await asyncio.wait([self.ready], timeout=left_s)
            if done:
                return self.ready.result()
        raise InternalError(f"no report from the loading engine for {timeout_s:.0f} s")


class EngineClient:
    """Connection to a running engine process; ``start`` creates both.

    ``inbox`` has the engine's ``Ready``. ``pools`` is the KV pool, or one pool for each rank on
    this host. ``pool_fd`` is the pool's memory file, opened for reading; -1 with several pools. The
    tasks and the file are closed with the process.
    """

    def __init__(
        self,
        process: EngineProcess,
        writer: asyncio.StreamWriter,
        inbox: ReportInbox,
        tasks: BackgroundTasks,
        pools: Sequence[memoryview],
        pool_fd: int,
    ) -> None:
        self.ready = inbox.ready.result()
        self.pool_geometry = self.ready.geometry  # of all ranks together
        self.pools = tuple(pools)
        self.pool_fd = pool_fd
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.wanted = asyncio.Event()  # set while commands are held
        self._held: list[messages.Command] | None = None
        self._process = process
        self._writer = writer
        self._inbox = inbox
        self._tasks = tasks

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        on_progress: Callable[[str], None] = lambda _: None,
        stderr: IO[bytes] | None = None,
        timeout_s: float = 120.0,
        count_task_failure: Callable[[str], None] = lambda _: None,
    ) -> "EngineClient":
        """Start a process and wait until it takes requests. Any failure ends the process.

        ``on_progress`` receives one line of text at a time. ``timeout_s`` limits the time between
        two reports while the engine loads.

        Raises:
            InternalError: The engine died or hangs while loading.
        """
        inbox = ReportInbox(on_progress)
        async with AsyncExitStack() as undo:
            tasks = BackgroundTasks("engine client", count_task_failure)
            undo.push_async_callback(tasks.close)
            settings = settings.on(len(os.sched_getaffinity(0)))
            taken = await take_engine(settings)
            count = settings.tensor_parallel if settings.own_pools else 1
            pool_fds = taken[2] if taken else [pool_file() for _ in range(count)]
            try:
                process: EngineProcess
                process, control = taken[:2] if taken else await _spawn(settings, pool_fds, stderr)
                undo.push_async_callback(_kill, process)
                reader, writer = await asyncio.open_connection(sock=control)
                undo.callback(writer.close)
                listening = tasks.spawn(_listen(reader, inbox, process), "listen")
                async with tasks.beside(_report_exit(process, listening, inbox), "loading"):
                    ready = await inbox.until_ready(timeout_s)
                ranks = settings.tensor_parallel if settings.own_pools else 1
                shapes = rank_geometries(ready.geometry, ranks)
                pools = [map_pool(fd, shape) for fd, shape in zip(pool_fds, shapes, strict=False)]
                for fd in pool_fds:
                    _seal(fd, alone=settings.tensor_parallel == 1 and not settings.sleeps)
                alone = not settings.own_pools
                reading_fd = os.open(f"/proc/self/fd/{pool_fds[0]}", os.O_RDONLY) if alone else -1
            finally:
                for fd in pool_fds:
                    os.close(fd)
            client = cls(process, writer, inbox, tasks, pools, reading_fd)
            tasks.spawn(client._watch(listening), "watch")
            undo.pop_all()
        return client

    def listen(self, listener: OnReport) -> None:
        """Call ``listener`` in the event loop for each report since the start, in order."""
        self._inbox.listen(listener)

    @property
    def pid(self) -> int:
        """Id of the process that holds the model."""
        return self._process.pid

    @property
    def fatal(self) -> str:
        """Message of the engine's ``Fatal`` report, or ""."""
        return self._inbox.fatal

    def send(self, *commands: messages.Command) -> None:
        """Send commands, or hold them; they are dropped if the process is ending."""
        if self._held is None:
            self.send_now(*commands)
        else:
            self._held += commands
            self.wanted.set()

    @property
    def holds(self) -> bool:
        """Return whether commands are held."""
        return self._held is not None

    def hold(self) -> None:
        """Hold commands from now on, until `release`."""
        self._held = []
        self.wanted.clear()

    def release(self) -> None:
        """Send the held commands, in order."""
        held, self._held = self._held, None
        if held:
            self.send_now(*held)

    def send_now(self, *commands: messages.Command) -> None:
        """Send commands before those that are held."""
        if not self._writer.is_closing():
            self._writer.write(messages.frame(list(commands)))

    async def stop(self, grace_s: float = 3.0) -> int:
        """Stop the process, by force after ``grace_s``, and return its exit code."""
        if self._process.returncode is None:
            self.send_now(messages.StopEngine())
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                await _kill(self._process)
        code = await self._process.wait()
        _kill_group(self._process)
        await self._tasks.close()
        if not self.exited.done():
            self.exited.set_result(code)
        self._writer.close()
        if self.pool_fd >= 0:
            os.close(self.pool_fd)
            self.pool_fd = -1
        return code

    async def _watch(self, listening: asyncio.Task[None]) -> None:
        code = await self._process.wait()
        _kill_group(self._process)
        await asyncio.wait([listening], timeout=_DRAIN_S)
        if not self.exited.done():
            self.exited.set_result(code)


def _seal(pool_fd: int, *, alone: bool) -> None:
    """Seal the size of a pool. If ``alone``, also prevent new writable mappings.

    Ranks may map the pool after this. The kernel frees no memory of a file without writable
    mappings, so pools that are given back stay without the second seal.
    """
    fcntl.fcntl(pool_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if alone:
        with suppress(OSError):  # before Linux 5.1
            fcntl.fcntl(pool_fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)


async def _spawn(
    settings: EngineSettings, pool_fds: Sequence[int], stderr: IO[bytes] | None
) -> tuple[EngineProcess, socket.socket]:
    ours, theirs = control_sockets()
    ours.setblocking(False)
    if settings.emulated is not None:
        return EngineThread(settings, theirs, pool_fds[0]), ours
    external = settings.external
    module = ENGINE_MODULES[external.kind if external is not None else ""]
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                module,
                str(theirs.fileno()),
                ",".join(map(str, pool_fds)),
                msgspec.json.encode(settings).decode(),
                pass_fds=(theirs.fileno(), *pool_fds),
                env=_environment(settings),
                stderr=stderr,
                start_new_session=external is not None,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _environment(settings: EngineSettings) -> dict[str, str]:
    threads = str(settings.threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",  # spinning threads of two workers starve each other
    }


async def _kill(process: EngineProcess) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
    _kill_group(process)


def _kill_group(process: EngineProcess) -> None:
    """Kill what an external engine has left behind in the group of its engine process."""
    if isinstance(process, asyncio.subprocess.Process):
        with suppress(ProcessLookupError):  # the group is empty, or the process led none
            os.killpg(process.pid, signal.SIGKILL)


async def _listen(reader: asyncio.StreamReader, inbox: ReportInbox, process: EngineProcess) -> None:
    try:
        while data := await reader.read(1 << 20):
            inbox.feed(data)
    except ConnectionError:
        return  # the process is ending; its watcher reports that
    except Exception as error:  # noqa: BLE001 - an engine without reports is useless
        _LOG.exception("failed to handle an engine report")
        inbox.fatal = f"{type(error).__name__}: {error}"
        await _kill(process)


async def _report_exit(
    process: EngineProcess, listening: asyncio.Task[None], inbox: ReportInbox
) -> None:
    code = await process.wait()
    await asyncio.wait([listening], timeout=_DRAIN_S)
    inbox.exited(code)
