"""An engine that was started before its worker, on the worker's side; see ``early_engines``."""

import asyncio
import os
import signal
import socket
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


class TakenEngine:
    """An engine that this worker has taken; the interface of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        connection.setblocking(False)
        self._loop.add_reader(connection, self._note_end)

    async def wait(self) -> int:
        """Return the exit code once the process has ended; negative: the signal."""
        return await asyncio.shield(self._ended)

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
        self.returncode = code
        self._ended.set_result(code)


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
