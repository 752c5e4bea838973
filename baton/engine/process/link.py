"""Connection of a worker's shell to an engine in the same process, as ``EngineClient`` is one."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from baton.engine.process import messages
from baton.types.geometry import KvGeometry


class InnerLink:
    """Connection to an engine in this process, which never sleeps and has no pages of KV.

    Reports arrive in a later turn of the loop, as from another process.

    Args:
        ready: Properties of the engine; its pool is its own, so that this one has one block.
    """

    pool_fd = -1
    fatal = ""
    holds = False

    def __init__(self, ready: messages.Ready) -> None:
        self.ready = ready
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.wanted = asyncio.Event()
        self.handle: Callable[[messages.Command], None] = lambda _: None
        self.close: Callable[[], Awaitable[None]] = _nothing
        self._pool = memoryview(bytearray(self.pool_geometry.pool_bytes))
        self._reports: deque[messages.Report] = deque()
        self._listener: Callable[[messages.Report], None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def pools(self) -> Sequence[memoryview]:
        """The pool, which nothing uses."""
        return (self._pool,)

    @property
    def pool_geometry(self) -> KvGeometry:
        """Shape of one block."""
        return msgspec.structs.replace(self.ready.geometry, num_blocks=1)

    def report(self, *reports: messages.Report) -> None:
        """Send reports to the shell."""
        if not self._reports:
            self._loop.call_soon(self._deliver)
        self._reports.extend(reports)

    def listen(self, listener: Callable[[messages.Report], None]) -> None:
        """Pass all reports to ``listener``."""
        self._listener = listener
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        try:
            while self._reports and self._listener is not None:
                self._listener(self._reports.popleft())
        finally:
            if self._reports and self._listener is not None:  # a report had a fault
                self._loop.call_soon(self._deliver)

    def send(self, *commands: messages.Command) -> None:
        """Let the engine execute commands."""
        for command in commands:
            self.handle(command)

    def send_now(self, *commands: messages.Command) -> None:
        """Let the engine execute commands."""
        self.send(*commands)

    def hold(self) -> None:
        """Do nothing: the engine does not sleep."""

    def release(self) -> None:
        """Do nothing: no commands are held."""

    async def stop(self) -> int:
        """Close the engine; return 0."""
        await self.close()
        if not self.exited.done():
            self.exited.set_result(0)
        return 0


async def _nothing() -> None:
    """Stand for a close before there is an engine."""
