"""Failure detection between the routers of a group.

A serving router accepts connections on a Unix socket, and sends its process id and then a heartbeat
every half a second. A death closes the connections at once; a router that hangs falls silent.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from baton.telemetry.alive_clock import ALIVE

BEAT_S = 0.5
SILENCE_S = 2.5  # a router that is silent for so long hangs
RETRY_S = 0.1


class RouterPresence:
    """Heartbeats of this router on a Unix socket, taken over from an earlier process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._listeners: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Start serving heartbeats on the Unix socket."""
        scratch = self._path.with_suffix(f".{os.getpid()}")
        scratch.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._talk, scratch)
        scratch.replace(self._path)  # a socket of that name exists at all times

    def close(self) -> None:
        """Stop serving heartbeats and close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._listeners:
            writer.close()

    async def _talk(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        # Python 3.11 logs a traceback for a cancelled handler, as at the end of the router.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            beat = b"%d\n" % os.getpid()
            while not writer.is_closing():
                writer.write(beat)
                await writer.drain()
                await asyncio.sleep(BEAT_S)
                beat = b"\n"
        self._listeners.discard(writer)
        writer.close()


async def watch_life(path: Path, on_change: Callable[[bool], None]) -> None:
    """Watch a router's socket across restarts, forever, and call back when it comes or goes."""
    known: bool | None = None

    def note(alive: bool) -> None:
        nonlocal known
        if alive is not known:
            known = alive
            on_change(alive)

    while True:
        ended_well = False
        with contextlib.suppress(OSError, TimeoutError):
            async with ALIVE.timeout(SILENCE_S):
                reader, writer = await asyncio.open_unix_connection(path)
            try:
                ended_well = await _read_to_end(reader, lambda: note(True))
            finally:
                writer.close()
        if not ended_well:  # else its successor may serve already: check at once
            note(False)
            await asyncio.sleep(RETRY_S)


async def _read_to_end(reader: asyncio.StreamReader, on_sign: Callable[[], None]) -> bool:
    """Read heartbeats until the router closes the connection; return whether there were any.

    Raises:
        TimeoutError: The router is silent, with the connection open.
    """
    signs = 0
    while True:
        async with ALIVE.timeout(SILENCE_S):
            if not await reader.readline():
                return signs > 0
        signs += 1
        on_sign()
