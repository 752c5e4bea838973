"""A slow link to a worker: a port of its own, behind which bytes come at a rate."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from tests.workers.harness import WorkerProcess

_PIECE_BYTES = 8 * 1024


class SlowLink:
    """What passes from the worker, and what is done once enough of it has."""

    def __init__(self, address: str, bytes_per_s: float) -> None:
        self.passed_bytes = 0
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._bytes_per_s = bytes_per_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._then: tuple[float, Callable[[], None]] = (float("inf"), lambda: None)

    def after(self, more_bytes: int, act: Callable[[], None]) -> None:
        """Act once when so many more have passed."""
        self._then = (self.passed_bytes + more_bytes, act)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        task = asyncio.current_task()
        self._tasks.add(task)
        to_worker = None
        try:
            from_worker, to_worker = await asyncio.open_connection(self._host, self._port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, to_worker, slow=False))
                both.create_task(self._pass(from_worker, writer, slow=True))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # either end is gone
        finally:
            self._tasks.discard(task)
            for end in (writer, to_worker):
                if end is not None:
                    end.close()
                    with contextlib.suppress(OSError):
                        await end.wait_closed()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
            if slow:
                await self._count(len(piece))
        writer.close()

    async def _count(self, piece_bytes: int) -> None:
        self.passed_bytes += piece_bytes
        limit_bytes, act = self._then
        if self.passed_bytes >= limit_bytes:
            self._then = (float("inf"), lambda: None)
            act()
        await asyncio.sleep(piece_bytes / self._bytes_per_s)

    def cut(self) -> None:
        """End all connections; what is on its way is lost."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cut all connections, and wait for their ends."""
        tasks = list(self._tasks)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def behind_slow_link(worker: WorkerProcess, bytes_per_s: float) -> AsyncIterator[SlowLink]:
    """Whoever is told of the worker meanwhile finds it behind the link.

    It must offer gRPC alone: by other ways it would be found where it is.
    """
    direct = worker.record
    link = SlowLink(direct.address, bytes_per_s)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    worker.record = msgspec.structs.replace(direct, address=f"127.0.0.1:{port}")
    try:
        yield link
    finally:
        worker.record = direct
        server.close()
        await link.close()
