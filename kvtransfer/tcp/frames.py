"""Protocol of a TCP connection: a hello, then one pull after another, each answered by frames.

    reader   hello   pull: PoolRequest.pull                …
    sender   hello   a length and a frame for each slice   …

``kvtransfer/hello.py`` has the hello; its version is part of the offer's address.

Lengths are 4 bytes, little-endian. In place of a frame, `ENDED` means that there are no more, and
`FAILED` that the sender failed.
Messages and bytes are not encrypted, so the worker of a fleet with TLS does not listen.
"""

import socket
import struct

import numpy as np
from google.protobuf.message import DecodeError, Message

from kvtransfer import hello
from kvtransfer.hello import receive

NAME = "tcp"
LENGTH = struct.Struct("<I")
ENDED = 0
FAILED = 0xFFFFFFFF
MOST_MESSAGE_BYTES = 4 << 20
HELLO_S = 2.0
_UNACKNOWLEDGED_MS = 20_000  # bytes without an acknowledgement for so long end the connection


def prepare(link: socket.socket) -> None:
    """Set socket options: small messages are sent at once, and a dead peer ends the connection."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def framed(message: Message) -> bytes:
    """Return a message with its length before it."""
    body = message.SerializeToString()
    return LENGTH.pack(len(body)) + body


def address_of(port: int) -> str:
    """Return the address that a worker offers: its port and the version of its hello."""
    return f"{port}/{hello.VERSION}"


def port_in(address: str) -> int | None:
    """Return the port of an offer, or None if its hello has another version."""
    port, _, version = address.partition("/")
    return int(port) if version == str(hello.VERSION) and port.isdecimal() else None


async def receive_length(link: socket.socket) -> int:
    """Return the next length; raise as `receive` does."""
    head = bytearray(LENGTH.size)
    await receive(link, memoryview(head))
    return int(LENGTH.unpack(head)[0])


async def receive_message(link: socket.socket) -> bytes:
    """Return the next message's bytes.

    Raises:
        OSError: The connection ended.
        DecodeError: The message is longer than any valid one.
    """
    length = await receive_length(link)
    if length > MOST_MESSAGE_BYTES:
        raise DecodeError(f"message of {length} bytes, limit {MOST_MESSAGE_BYTES}")
    body = bytearray(length)
    await receive(link, memoryview(body))
    return bytes(body)


class Buffers:
    """Reused memory for frames: fresh memory has to be cleared by the kernel first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[memoryview] = []

    def take(self, size_bytes: int) -> memoryview:
        """Return a buffer of that size or larger."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= size_bytes:
                return buffer
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Take back a buffer that is not read any more."""
        if len(self._free) < self._most:
            self._free.append(buffer)
