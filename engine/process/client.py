"""The shell's handle on a step-loop process: start it, send commands, hear reports."""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from engine.core.errors import InternalError
from engine.process import messages
from engine.settings import EngineSettings

_LOG = logging.getLogger(__name__)


class EngineClient:
    """One engine process.

    Args:
        settings: How to build the engine.
        on_report: Called in the event loop for each report, in order.
        on_progress: Called with a line of text while the engine loads.
        stderr: Where the process writes its errors.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_report: Callable[[messages.Report], None],
        on_progress: Callable[[str], None] = lambda _: None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._settings = settings
        self._on_report = on_report
        self._on_progress = on_progress
        self._stderr = stderr
        self._reader = messages.report_reader()
        self._fatal = ""
        self._heard_s = 0.0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()

    async def start(self, timeout_s: float = 120.0) -> messages.Ready:
        """Start the process and wait until it takes requests.

        Args:
            timeout_s: How long it may say nothing; to load a large model takes longer.

        Raises:
            InternalError: It died or hangs while loading; the message says why.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        pool_fd = os.memfd_create("baton-kv")  # the kernel frees it with its last user
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "engine.process.step_loop",
                str(theirs.fileno()),
                str(pool_fd),
                msgspec.json.encode(self._settings).decode(),
                pass_fds=(theirs.fileno(), pool_fd),
                env=self._environment(),
                stderr=self._stderr,
            )
            theirs.close()
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._tasks = [
                asyncio.create_task(self._listen(reader)),
                asyncio.create_task(self._watch()),
            ]
            self.ready = await self._until_ready(timeout_s)
            self.pool = memoryview(mmap.mmap(pool_fd, self.ready.geometry.pool_bytes))
        except TimeoutError as error:
            await self.stop(grace_s=0)
            raise InternalError(f"the engine said nothing for {timeout_s:.0f} s") from error
        finally:
            os.close(pool_fd)
        return self.ready

    async def _until_ready(self, timeout_s: float) -> messages.Ready:
        self._heard_s = time.monotonic()
        while (left_s := self._heard_s + timeout_s - time.monotonic()) > 0:
            done, _ = await asyncio.wait([self._ready], timeout=left_s)
            if done:
                return self._ready.result()
        raise TimeoutError

    def _environment(self) -> dict[str, str]:
        threads = str(self._settings.threads)
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "passive",  # spinning threads of two workers starve each other
        }

    @property
    def pid(self) -> int:
        """The process that holds the model."""
        return self._process.pid

    def send(self, *commands: messages.Command) -> None:
        """Queue commands; they are lost, and that is harmless, when the process is dying."""
        if not self._writer.is_closing():
            self._writer.write(messages.frame(list(commands)))

    async def stop(self, grace_s: float = 3.0) -> int:
        """End the process, by force after ``grace_s``; returns its exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(AttributeError):  # before the socket was there
                self.send(messages.Stop())
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        code = await self._process.wait()
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_writer"):
            self._writer.close()
        return code

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(1 << 20):
                self._dispatch(self._reader.feed(data))
        except ConnectionError:
            return  # the process is ending: `_watch` tells
        except Exception as error:  # noqa: BLE001 - better dead than deaf
            _LOG.exception("a report could not be handled")
            self._fatal = f"{type(error).__name__}: {error}"
            self._process.kill()

    def _dispatch(self, reports: Sequence[messages.Report]) -> None:
        for report in reports:
            match report:
                case messages.Progress():
                    self._heard_s = time.monotonic()
                    self._on_progress(report.what)
                case messages.Ready():
                    if not self._ready.done():
                        self._ready.set_result(report)
                case messages.Fatal():
                    self._fatal = report.message
                case _:
                    self._on_report(report)

    async def _watch(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(0)  # let a last report be read
        if not self._ready.done():
            self._ready.set_exception(
                InternalError(self._fatal or f"the engine process exited with code {code}")
            )
        if not self.exited.done():
            self.exited.set_result(code)

    @property
    def fatal(self) -> str:
        """What the engine said before it died, or ""."""
        return self._fatal
