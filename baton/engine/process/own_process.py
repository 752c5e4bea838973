"""Engines of a worker that asyncio has not started: one that it takes, and one in a thread."""

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress

import msgspec

from baton.engine.settings import EngineSettings

SOCKET_VARIABLE = "BATON_EARLY_ENGINES"
"""Names the socket of ``early_engines`` in the environment of workers."""

_ANSWER_LIMIT_S = 60.0  # the import of torch from a cold disk included


class EarlyEngine(msgspec.Struct, frozen=True):
    """An engine to start: its settings, and the file of its output."""

    settings: EngineSettings
    log: str


class _OwnProcess:
    """Interface of ``asyncio.subprocess.Process`` of an engine that asyncio has not started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()

    async def wait(self) -> int:
        """Return the exit code once the engine has ended; negative: the signal."""
        return await asyncio.shield(self._ended)

    def _note_code(self, code: int) -> None:
        self.returncode = code
        if not self._ended.done():
            self._ended.set_result(code)


class TakenEngine(_OwnProcess):
    """An engine that was started before this worker, which has taken it; see ``early_engines``."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        super().__init__(pid)
        self._connection = connection
        connection.setblocking(False)
        self._loop.add_reader(connection, self._note_end)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _note_end(self) -> None:
        code = -int(signal.SIGKILL)  # without a message its parent was killed, and it with that
        with suppress(OSError, ValueError):
            code = int(self._connection.recv(16))
        self._loop.remove_reader(self._connection)
        self._connection.close()
        self._note_code(code)


class EngineThread(_OwnProcess):
    """Step loop in a thread of the shell, for emulated engines, which mostly sleep.

    It ends after ``Stop``, or when the other end of its socket closes. ``control``, its end of the
    socket pair, is closed with the loop; ``pool_fd`` is duplicated.
    """

    def __init__(self, settings: EngineSettings, control: socket.socket, pool_fd: int) -> None:
        super().__init__(os.getpid())
        self._control = control
        arguments = (settings, os.dup(pool_fd))
        self._thread = threading.Thread(
            target=self._run, args=arguments, daemon=True, name="step loop"
        )
        self._thread.start()

    def kill(self) -> None:
        """End the loop after its current step."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _run(self, settings: EngineSettings, pool_fd: int) -> None:
        code = 1
        try:
            from baton.engine.process.step_loop import run  # only needed for emulated engines

            code = run(settings, self._control, pool_fd)
        finally:
            os.close(pool_fd)
            self._control.close()
            with suppress(RuntimeError):  # the event loop has ended first
                self._loop.call_soon_threadsafe(self._note_end, code)

    def _note_end(self, code: int) -> None:
        self._thread.join()  # this call was its last act
        self._note_code(code)


async def take_engine(
    settings: EngineSettings,
) -> tuple[TakenEngine, socket.socket, list[int]] | None:
    """Take an engine with these settings: the process, its socket, and its memory file in a list.

    Returns None if there is no such engine.
    """
    path = os.environ.get(SOCKET_VARIABLE)
    taken = await asyncio.to_thread(_ask, path, settings) if path else None
    if taken is None:
        return None
    pid, connection, (control, pool) = taken
    ours = socket.socket(fileno=control)
    ours.setblocking(False)
    return TakenEngine(pid, connection), ours, [pool]


def _ask(path: str, settings: EngineSettings) -> tuple[int, socket.socket, list[int]] | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):  # no process listens: all are taken
        connection.settimeout(_ANSWER_LIMIT_S)
        connection.connect(path)
        connection.send(msgspec.json.encode(settings))
        pid, descriptors, *_ = socket.recv_fds(connection, 16, 2)
        if pid:
            return int(pid), connection, descriptors
    connection.close()
    return None
