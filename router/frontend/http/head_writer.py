"""Sending the head of a response together with its first piece, which saves a system call."""

import asyncio

_HEAD = b"HTTP/1.1 "


class HeadWriter:
    """Transport of one connection that delays a response's head until the body begins.

    The head is sent with the next write, and at the latest in the next turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        """Write the delayed head and ``data``; delay ``data`` if it is a head itself."""
        if self._held:
            data = self._held + data
            self._held = b""
        elif data.startswith(_HEAD):
            self._held = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write the delayed head, if there is one."""
        if self._held:
            self.write(b"")

    def is_closing(self) -> bool:
        """Return whether the connection is closing or closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after all written data is sent."""
        self.flush()
        self._transport.close()
