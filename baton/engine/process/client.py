"""The shell's handle on a step-loop process: start it, send commands, hear reports."""

import asyncio
import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import IO

import msgspec

from baton.engine.core.split import rank_geometries
from baton.engine.ipc import map_pool
from baton.engine.process import messages
from baton.engine.process.thread import EngineThread
from baton.engine.settings import EngineSettings
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import InternalError

_LOG = logging.getLogger(__name__)

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11 does not name it
_LAST_WORDS_S = 2.0  # to read what a process said before it ended; all of it is in the socket

EngineProcess = asyncio.subprocess.Process | EngineThread
OnReport = Callable[[messages.Report], None]


class ReportInbox:
    """Reads an engine's reports: those about loading itself, all others for a listener.

    Args:
        on_progress: Called with a line of text while the engine loads.
    """

    def __init__(self, on_progress: Callable[[str], None] = lambda _: None) -> None:
        self.fatal = ""  # what the engine said before it died
        self.ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress
        self._reader = messages.report_reader()
        self._heard_s = time.monotonic()
        self._early: list[messages.Report] = []  # came before anybody listened
        self._listener: OnReport = self._early.append

    def listen(self, listener: OnReport) -> None:
        """From now on ``listener`` is called with each report, in order."""
        self._listener = listener
        for report in self._early:
            listener(report)
        self._early.clear()

    def feed(self, data: bytes) -> None:
        """Bytes came from the engine."""
        self.dispatch(self._reader.feed(data))

    def dispatch(self, reports: Sequence[messages.Report]) -> None:
        """Pass reports on, in order."""
        for report in reports:
            match report:
                case messages.Progress():
                    self._heard_s = time.monotonic()
                    self._on_progress(report.what)
                case messages.Ready():
                    if not self.ready.done():
                        self.ready.set_result(report)
                case messages.Fatal():
                    self.fatal = report.message
                case _:
                    self._listener(report)

    def exited(self, code: int) -> None:
        """The process is gone: whoever waits for it to be ready shall hear of it."""
        if not self.ready.done():
            self.ready.set_exception(
                InternalError(self.fatal or f"the engine process exited with code {code}")
            )
            self.ready.exception()  # marks it as seen, should nobody wait any more

    async def until_ready(self, timeout_s: float) -> messages.Ready:
        """The engine's first report.

        Raises:
            InternalError: It said nothing for ``timeout_s``, or died.
        """
        self._heard_s = time.monotonic()
        while (left_s := self._heard_s + timeout_s - time.monotonic()) > 0:
            done, _ = await asyncio.wait([self.ready], timeout=left_s)
            if done:
                return self.ready.result()
        raise InternalError(f"the engine said nothing for {timeout_s:.0f} s")


class EngineClient:
    """One engine process that takes requests; ``start`` makes it.

    Args:
        process: The engine.
        writer: To it.
        inbox: From it.
        listening: Feeds the inbox, until the process says no more.
        tasks: What runs in the background; ended with the process.
        ready: What the engine said when it was loaded.
        pools: Its KV pool, or one for each rank on this host.
        pool_fd: The pool's memory file, opened for reading; closed with the process. -1 where there
            is more than one.
    """

    def __init__(
        self,
        process: EngineProcess,
        writer: asyncio.StreamWriter,
        inbox: ReportInbox,
        listening: asyncio.Task[None],
        tasks: BackgroundTasks,
        ready: messages.Ready,
        pools: Sequence[memoryview],
        pool_fd: int,
    ) -> None:
        self.ready = ready
        self.pools = tuple(pools)
        self.pool_fd = pool_fd
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._writer = writer
        self._inbox = inbox
        self._tasks = tasks
        tasks.spawn(self._watch(listening), "watch")

    @classmethod
    async def start(
        cls,
        settings: EngineSettings,
        on_progress: Callable[[str], None] = lambda _: None,
        stderr: IO[bytes] | None = None,
        timeout_s: float = 120.0,
        count_task_failure: Callable[[str], None] = lambda _: None,
    ) -> "EngineClient":
        """Start a process and wait until it takes requests.

        Whatever else ends this, a cancellation too, ends the process.

        Args:
            settings: How to build the engine.
            on_progress: Called with a line of text while the engine loads.
            stderr: Where the process writes its errors.
            timeout_s: How long it may say nothing; to load a large model takes longer.
            count_task_failure: See ``BackgroundTasks``.

        Raises:
            InternalError: It died or hangs while loading; the message says why.
        """
        inbox = ReportInbox(on_progress)
        async with AsyncExitStack() as undo:
            tasks = BackgroundTasks("engine client", count_task_failure)
            undo.push_async_callback(tasks.close)
            pool_fds = [_pool_file() for _ in range(_pool_count(settings))]
            try:
                process, control = await _spawn(settings, pool_fds, stderr)
                undo.push_async_callback(_kill, process)
                reader, writer = await asyncio.open_connection(sock=control)
                undo.callback(writer.close)
                listening = tasks.spawn(_listen(reader, inbox, process), "listen")
                async with tasks.beside(_tell_exit(process, listening, inbox), "loading"):
                    ready = await inbox.until_ready(timeout_s)
                ranks = settings.tensor_parallel if settings.own_pools else 1
                shapes = rank_geometries(ready.geometry, ranks)
                pools = [map_pool(fd, shape) for fd, shape in zip(pool_fds, shapes, strict=False)]
                for fd in pool_fds:
                    _seal(fd, alone=settings.tensor_parallel == 1)
                alone = not settings.own_pools
                reading_fd = os.open(f"/proc/self/fd/{pool_fds[0]}", os.O_RDONLY) if alone else -1
            finally:
                for fd in pool_fds:
                    os.close(fd)
            client = cls(process, writer, inbox, listening, tasks, ready, pools, reading_fd)
            undo.pop_all()
        return client

    def listen(self, listener: OnReport) -> None:
        """Call ``listener`` in the event loop for each report since the start, in order."""
        self._inbox.listen(listener)

    @property
    def pid(self) -> int:
        """The process that holds the model."""
        return self._process.pid

    @property
    def fatal(self) -> str:
        """What the engine said before it died, or ""."""
        return self._inbox.fatal

    def send(self, *commands: messages.Command) -> None:
        """Queue commands; they are lost, and that is harmless, when the process is dying."""
        if not self._writer.is_closing():
            self._writer.write(messages.frame(list(commands)))

    async def stop(self, grace_s: float = 3.0) -> int:
        """End the process, by force after ``grace_s``; returns its exit code."""
        if self._process.returncode is None:
            self.send(messages.Stop())
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                await _kill(self._process)
        code = await self._process.wait()
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
        await asyncio.wait([listening], timeout=_LAST_WORDS_S)
        if not self.exited.done():
            self.exited.set_result(code)


def _pool_count(settings: EngineSettings) -> int:
    """On this host: ranks that are elsewhere have theirs there."""
    return settings.tensor_parallel if settings.own_pools and not settings.rank_orders else 1


def _pool_file() -> int:
    """The kernel frees it with its last user. Whoever maps it may rely on its size."""
    return os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seal(pool_fd: int, *, alone: bool) -> None:
    """Keep a pool's size and, where one process has it, keep others from mapping it for writing.

    Ranks map it when they come to it, which may be after this.
    """
    fcntl.fcntl(pool_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if alone:
        with suppress(OSError):  # before Linux 5.1
            fcntl.fcntl(pool_fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)


async def _spawn(
    settings: EngineSettings, pool_fds: Sequence[int], stderr: IO[bytes] | None
) -> tuple[EngineProcess, socket.socket]:
    """The engine and our end of the socket to it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    settings = settings.on(len(os.sched_getaffinity(0)))
    if settings.emulated is not None:
        return EngineThread(settings, theirs, pool_fds[0]), ours
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "baton.engine.process.step_loop",
                str(theirs.fileno()),
                ",".join(map(str, pool_fds)),
                msgspec.json.encode(settings).decode(),
                pass_fds=(theirs.fileno(), *pool_fds),
                env=_environment(settings),
                stderr=stderr,
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


async def _listen(reader: asyncio.StreamReader, inbox: ReportInbox, process: EngineProcess) -> None:
    try:
        while data := await reader.read(1 << 20):
            inbox.feed(data)
    except ConnectionError:
        return  # the process is ending: whoever watches it tells
    except Exception as error:  # noqa: BLE001 - better dead than deaf
        _LOG.exception("a report could not be handled")
        inbox.fatal = f"{type(error).__name__}: {error}"
        await _kill(process)


async def _tell_exit(
    process: EngineProcess, listening: asyncio.Task[None], inbox: ReportInbox
) -> None:
    code = await process.wait()
    await asyncio.wait([listening], timeout=_LAST_WORDS_S)
    inbox.exited(code)
