"""Step loop in a thread of the shell, for emulated engines, which mostly sleep.

It has the interface of ``asyncio.subprocess.Process`` for ``EngineClient``, and the same socket.
"""

import asyncio
import contextlib
import os
import socket
import threading

from baton.engine.settings import EngineSettings


class EngineThread:
    """Running step loop; it ends after ``Stop``, or when the other end of its socket closes.

    ``control``, its end of the socket pair, is closed with the loop; ``pool_fd`` is duplicated.
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
        """Return the exit code once the loop has ended."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End the loop after its current step."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _run(self, settings: EngineSettings, pool_fd: int) -> None:
        code = 1
        try:
            from baton.engine.process.step_loop import run  # only needed for emulated engines

            code = run(settings, self._control, pool_fd)
        finally:
            os.close(pool_fd)
            self._control.close()
            with contextlib.suppress(RuntimeError):  # the event loop has ended first
                self._loop.call_soon_threadsafe(self._note_end, code)

    def _note_end(self, code: int) -> None:
        self._thread.join()  # this call was its last act
        self.returncode = code
        if not self._ended.done():
            self._ended.set_result(code)
