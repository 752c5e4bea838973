"""How a leader reaches ranks that are not its children: TCP, with a hello before the orders."""

import asyncio
import socket
from typing import NamedTuple

import msgspec

from baton.engine.ipc import LENGTH

_MOST_BYTES = 4096
_DEAD_MS = 10_000  # unanswered for so long, a connection is broken


class Hello(msgspec.Struct, frozen=True):
    """First bytes of a connection.

    Attributes:
        secret: As the rank's program said it.
        store: Where the ranks of the replica meet: ``tcp://HOST:PORT``.
    """

    secret: str
    store: str


class RankAddress(NamedTuple):
    """Where a rank waits for its leader's engine process."""

    host: str
    port: int
    secret: str

    @classmethod
    def parse(cls, text: str) -> "RankAddress":
        """From ``HOST:PORT/SECRET``."""
        address, _, secret = text.rpartition("/")
        host, _, port = address.rpartition(":")
        return cls(host, int(port), secret)


def connect(address: RankAddress, timeout_s: float) -> socket.socket:
    """A connection to a rank, on which nothing was said.

    Raises:
        OSError: It cannot be reached.
    """
    connection = socket.create_connection((address.host, address.port), timeout_s)
    steady(connection)
    return connection


def greet(connection: socket.socket, address: RankAddress, store: str) -> None:
    """The hello; behind it come orders.

    Raises:
        OSError: It broke.
    """
    body = msgspec.msgpack.encode(Hello(address.secret, store))
    connection.sendall(LENGTH.pack(len(body)) + body)


async def read_hello(connection: socket.socket) -> Hello:
    """The hello, and not a byte more.

    Raises:
        ValueError, OSError: It is none.
    """
    connection.setblocking(False)
    (length,) = LENGTH.unpack(await _exactly(connection, LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a hello of {length} bytes")
    return msgspec.msgpack.decode(await _exactly(connection, length), type=Hello)


async def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    got = b""
    while len(got) < size_bytes:
        data = await loop.sock_recv(connection, size_bytes - len(got))
        if not data:
            raise ValueError("it ended")
        got += data
    return got


def steady(connection: socket.socket) -> None:
    """Small words at once, and an end for a connection whose other side was cut off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
