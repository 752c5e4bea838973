"""Relay in front of Redis that can stop forwarding, as a network that is cut."""

import asyncio
from pathlib import Path


class Relay:
    """Forwards connections to ``to``, a Unix socket or a port. They stay open during a cut."""

    def __init__(self, to: Path | int) -> None:
        self.port = 0
        self.to = to
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self, outage_s: float) -> None:
        self._open.clear()
        await asyncio.sleep(outage_s)
        self._open.set()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self.to, int):
                there = await asyncio.open_connection("127.0.0.1", self.to)
            else:
                there = await asyncio.open_unix_connection(self.to)
        except OSError:
            writer.close()
            return
        for ends in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(*ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
