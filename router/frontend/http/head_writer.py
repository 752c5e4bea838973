"""Sends the head of a response together with the first piece of its body: one system call less."""

import asyncio

_HEAD = b"HTTP/1.1 "


class HeadWriter:
    """Transport of one connection that holds a response's head until the body begins.

    The head is held until the next write, and until the next turn of the event loop at most.

    Args:
        transport: Transport of the connection.
        loop: Event loop of the connection.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        """Write ``data``, after the head that is held; hold it if it is a head itself."""
        if self._held:
            data = self._held + data
            self._held = b""
        elif data.startswith(_HEAD):
            self._held = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write the head that is held, if there is one."""
        if self._held:
            self.write(b"")

    def is_closing(self) -> bool:
        """Return whether the connection is closing or closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after what was written."""
        self.flush()
        self._transport.close()
