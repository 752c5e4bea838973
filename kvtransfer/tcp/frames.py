"""What passes over a connection: a hello, then pulls one after the other, each answered by frames.

    reader   hello   pull: PoolRequest.pull                …
    sender   hello   a length and a frame for each slice   …

The hello is of ``kvtransfer/listening/hello.py``; its version is part of the offer's address.

Lengths are 4 bytes, little-endian. In place of a frame `ENDED` says that there are no more, and
`FAILED` that the sender could not go on.
Messages and bytes are plain text, so a fleet with TLS does not listen (``fleet/worker.py``).
"""

import socket
import struct

import numpy as np
from google.protobuf.message import DecodeError, Message

from kvtransfer.listening import hello
from kvtransfer.listening.hello import receive

NAME = "tcp"
LENGTH = struct.Struct("<I")
ENDED = 0
FAILED = 0xFFFFFFFF
MOST_MESSAGE_BYTES = 4 << 20
HELLO_S = 2.0
_UNHEARD_MS = 20_000  # bytes that nobody has taken for so long end the connection


def prepare(link: socket.socket) -> None:
    """Set a connection so that small messages go at once, and so that it ends with its far end."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)


def framed(message: Message) -> bytes:
    """A message as it goes over the connection."""
    body = message.SerializeToString()
    return LENGTH.pack(len(body)) + body


def address_of(port: int) -> str:
    """What a worker offers: its port, and the hello that is spoken there."""
    return f"{port}/{hello.VERSION}"


def port_in(address: str) -> int | None:
    """The port of an offer; None where another hello is spoken."""
    port, _, version = address.partition("/")
    return int(port) if version == str(hello.VERSION) and port.isdecimal() else None


async def receive_length(link: socket.socket) -> int:
    """The next length; raises as `receive` does."""
    head = bytearray(LENGTH.size)
    await receive(link, memoryview(head))
    return int(LENGTH.unpack(head)[0])


async def receive_message(link: socket.socket) -> bytes:
    """The next message's bytes.

    Raises:
        OSError: The connection ended.
        DecodeError: It is longer than any message is.
    """
    length = await receive_length(link)
    if length > MOST_MESSAGE_BYTES:
        raise DecodeError(f"a message of {length} bytes")
    body = bytearray(length)
    await receive(link, memoryview(body))
    return bytes(body)


class Buffers:
    """Memory for frames that is used again: what the kernel gives anew has to be cleared first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[memoryview] = []

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of that size or larger."""
        while self._free:
            buffer = self._free.pop()
            if len(buffer) >= size_bytes:
                return buffer
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Nobody reads it any more."""
        if len(self._free) < self._most:
            self._free.append(buffer)
