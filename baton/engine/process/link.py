"""Connection of a worker's shell to an engine in the same process, as ``EngineClient`` is one."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property

import msgspec

from baton.engine.process import messages


class InnerLink:
    """Connection to an engine in this process, which never sleeps.

    Reports arrive in a later turn of the loop, as from another process. The engine's pool is its
    own, so that ``pools`` has one block, unless a subclass has more.

    Args:
        ready: Properties of the engine.
    """

    pool_fd = -1
    holds = False

    def __init__(self, ready: messages.Ready) -> None:
        self.ready = ready
        self.fatal = ""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.wanted = asyncio.Event()
        self.handle: Callable[[messages.Command], None] = lambda _: None
        self.close: Callable[[], Awaitable[None]] = _nothing
        self.pool_geometry = msgspec.structs.replace(ready.geometry, num_blocks=1)
        self._reports: deque[messages.Report] = deque()
        self._listener: Callable[[messages.Report], None] | None = None
        self._loop = asyncio.get_running_loop()

    @cached_property
    def pools(self) -> Sequence[memoryview]:
        """The pool, which nothing uses."""
        return (memoryview(bytearray(self.pool_geometry.pool_bytes)),)

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

    send_now = send

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
