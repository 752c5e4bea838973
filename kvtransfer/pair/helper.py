"""Handle of one helper process (``baton.engine.process.pair``) of the experimental transport.

Frames pass through staging memory that both processes map, one slot for each.
"""

import asyncio
import contextlib
import mmap
import os
import socket
import sys
from collections import deque

from baton.telemetry.tasks import BackgroundTasks
from kvtransfer.transport import TransportError

SENDER = 0
RECEIVER = 1
SLOTS = 6
START_S = 30.0  # importing torch takes seconds
SLOT_BYTES = 4 << 20  # each frame costs a message on the control stream and one in each helper
_NUMBER_BYTES = 8
_ORDER_BYTES = 24


class Helper:
    """A process at one end of a group. ``start`` it, and always ``kill`` it in the end."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self.store_port = 0
        self._tasks = tasks
        self._process: asyncio.subprocess.Process | None = None
        self._staging = memoryview(b"")
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._moving: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writer: asyncio.StreamWriter | None = None
        self._stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._dead = False

    async def start(self, rank: int, store: str, host: str, device: str = "cpu") -> None:
        """Start the process, and set the sending end's ``store_port``; the group forms later."""
        staging_fd = os.memfd_create("baton-pair")
        ours, theirs = socket.socketpair()
        try:
            os.ftruncate(staging_fd, SLOTS * SLOT_BYTES)
            self._staging = memoryview(mmap.mmap(staging_fd, SLOTS * SLOT_BYTES))
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "baton.engine.process.pair",
                    str(rank),
                    store,
                    host,
                    device,
                    str(theirs.fileno()),
                    str(staging_fd),
                    pass_fds=(theirs.fileno(), staging_fd),
                )
            ours.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(START_S):
                if rank == SENDER:
                    self.store_port, _ = await _report(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            ours.close()
            await self.kill()
            raise TransportError(f"the helper process did not start: {error}") from error
        finally:
            os.close(staging_fd)
        for slot in range(SLOTS):
            self._free.put_nowait(slot)
        self._tasks.spawn(self._listen(reader), "helper")

    async def until_it_stands(self) -> None:
        """Wait until both ranks have joined the group."""
        await asyncio.shield(self._stands)

    async def credit(self) -> int:
        """Wait for a free slot."""
        return await self._free.get()

    def slot(self, number: int, size: int) -> memoryview:
        """Return the staging memory of one frame."""
        begin = number * SLOT_BYTES
        return self._staging[begin : begin + size]

    def give_back(self, slot: int) -> None:
        """Free a slot of the staging memory."""
        self._free.put_nowait(slot)

    def order(self, slot: int, size: int) -> "asyncio.Future[None]":
        """Send or receive one frame; resolves when it is done, in the order of the calls."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._dead or self._writer is None:
            done.set_exception(TransportError("the helper process ended"))
            done.exception()
            return done
        self._moving.append((slot, done))
        parts = (len(self._moving), slot * SLOT_BYTES, size)
        self._writer.write(b"".join(part.to_bytes(_NUMBER_BYTES, "little") for part in parts))
        return done

    async def kill(self) -> None:
        """Kill the process: the only way to end a collective that hangs."""
        self._fall()
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        cancelled = False
        while self._process.returncode is None:  # takes milliseconds; not interrupted by a cancel
            try:
                await self._process.wait()
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            await _report(reader)
            self._stands.set_result(None)
            while True:
                await _report(reader)
                _, done = self._moving.popleft()
                if not done.done():
                    done.set_result(None)
        except (asyncio.IncompleteReadError, OSError):
            self._fall()

    def _fall(self) -> None:
        self._dead = True
        for waiting in (self._stands, *(done for _, done in self._moving)):
            if not waiting.done():
                waiting.set_exception(TransportError("the helper process ended"))
                waiting.exception()


async def _report(reader: asyncio.StreamReader) -> tuple[int, int]:
    report = await reader.readexactly(_ORDER_BYTES)
    number = report[:_NUMBER_BYTES]
    offset = report[_NUMBER_BYTES : 2 * _NUMBER_BYTES]
    return int.from_bytes(number, "little"), int.from_bytes(offset, "little")
