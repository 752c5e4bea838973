"""How routers of a group know of each other's life and death: by connections that end.

A router that serves holds a socket open; whoever connects is told its process id and then, every
half a second, that it is still there. A death closes the connections at once; a router that hangs
falls silent.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from baton.telemetry.alive_clock import ALIVE

BEAT_S = 0.5
SILENCE_S = 2.5  # a router that says nothing for so long hangs
RETRY_S = 0.1


class Presence:
    """Says that this router lives.

    Args:
        path: Where; taken over from an earlier life that may still be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._listeners: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Begin to."""
        scratch = self._path.with_suffix(f".{os.getpid()}")
        scratch.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._talk, scratch)
        scratch.replace(self._path)  # at no time is there no socket of that name

    def close(self) -> None:
        """Say no more."""
        if self._server is not None:
            self._server.close()
        for writer in self._listeners:
            writer.close()

    async def _talk(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        with contextlib.suppress(OSError):
            writer.write(b"%d\n" % os.getpid())
            while not writer.is_closing():
                await writer.drain()
                await asyncio.sleep(BEAT_S)
                writer.write(b"\n")
        self._listeners.discard(writer)
        writer.close()


async def watch_life(path: Path, on_change: Callable[[bool], None]) -> None:
    """Follow one router's lives, without end.

    Args:
        path: Where it says that it lives.
        on_change: Told of its life and death; of the first look too.
    """
    known: bool | None = None

    def note(lives: bool) -> None:
        nonlocal known
        if lives is not known:
            known = lives
            on_change(lives)

    while True:
        ended_well = False
        with contextlib.suppress(OSError, TimeoutError):
            async with ALIVE.timeout(SILENCE_S):
                reader, writer = await asyncio.open_unix_connection(path)
            try:
                ended_well = await _until_its_end(reader, lambda: note(True))
            finally:
                writer.close()
        if not ended_well:  # else its next life may be here already: look at once
            note(False)
            await asyncio.sleep(RETRY_S)


async def _until_its_end(reader: asyncio.StreamReader, on_sign: Callable[[], None]) -> bool:
    """Read until the other side closes; whether it had said anything.

    Raises:
        TimeoutError: It has not closed, and says nothing.
    """
    signs = 0
    while True:
        async with ALIVE.timeout(SILENCE_S):
            if not await reader.readline():
                return signs > 0
        signs += 1
        on_sign()
