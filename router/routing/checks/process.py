"""Process that works on clients' text with limits; see ``baton/text/confined.py``."""

import asyncio
import contextlib
import signal
import sys

from baton.text.confined import LENGTH
from baton.types.errors import UnavailableError

START_LIMIT_S = 60.0
_EXIT_S = 1.0  # between the end of a process's output and its own
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # its own faults end it otherwise


class ProcessEndedError(Exception):
    """The process ended before it answered.

    Attributes:
        killed: Another process ended it, so the question may be harmless.
    """

    def __init__(self, *, killed: bool = False) -> None:
        super().__init__()
        self.killed = killed


class ConfinedProcess:
    """Process of a Python module that answers one frame at a time. It runs from `start` on.

    The caller sends one question at a time. A question that is cancelled, or not answered in time,
    ends the process, because its answer would be taken for that of the next question.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """True if the process runs, as far as is known."""
        process = self._process
        if process is None or process.stdin is None:
            return False
        return process.returncode is None and not process.stdin.is_closing()

    async def start(self, hello: bytes = b"") -> bytes:
        """Start the process, send ``hello``, and return the body of its first frame.

        Raises:
            UnavailableError: The process does not start.
        """
        await self.kill()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            return await self.ask(hello, START_LIMIT_S)
        except (OSError, TimeoutError, ProcessEndedError) as error:
            raise UnavailableError(f"the process of {self._module} does not start") from error

    async def ask(self, question: bytes, limit_s: float) -> bytes:
        """Send a frame, and return the body of the answer.

        Raises:
            ProcessEndedError: The process ended.
            TimeoutError: There was no answer in time.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ProcessEndedError
        if process.stdin.is_closing():  # uvloop would raise a RuntimeError
            raise ProcessEndedError
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(question)
                await process.stdin.drain()
                (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError) as error:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _EXIT_S)
            killed = process.returncode in _KILLED
            await self.kill()
            raise ProcessEndedError(killed=killed) from error
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End the process, and wait for it."""
        process = self._process
        self._process = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
