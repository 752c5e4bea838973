"""A step loop in a thread of the shell, for emulated engines: they sleep, and share one process.

It looks to ``EngineClient`` like ``asyncio.subprocess.Process``; the two talk over the same socket.
"""

import asyncio
import contextlib
import os
import socket
import threading

from baton.engine.settings import EngineSettings


class EngineThread:
    """One step loop, running; ends when told to, or when the other end of its socket closes.

    Args:
        settings: How to build the engine.
        control: Its end of the socket pair, which is closed with the loop.
        pool_fd: The memory file for the KV pool; a copy of it is kept until the pool is mapped.
    """

    def __init__(self, settings: EngineSettings, control: socket.socket, pool_fd: int) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._control = control
        arguments = (settings, os.dup(pool_fd))
        self._thread = threading.Thread(
            target=self._run, args=arguments, daemon=True, name="step loop"
        )
        self._thread.start()

    async def wait(self) -> int:
        """The code that a process would have ended with."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it as soon as its step is over."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _run(self, settings: EngineSettings, pool_fd: int) -> None:
        code = 1
        try:
            from baton.engine.process.step_loop import run  # not in shells of processes

            code = run(settings, self._control, pool_fd)
        finally:
            os.close(pool_fd)
            self._control.close()
            with contextlib.suppress(RuntimeError):  # the event loop has ended before us
                self._loop.call_soon_threadsafe(self._note_end, code)

    def _note_end(self, code: int) -> None:
        self._thread.join()  # this call was its last act
        self.returncode = code
        if not self._ended.done():
            self._ended.set_result(code)
