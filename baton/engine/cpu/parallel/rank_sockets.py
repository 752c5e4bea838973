"""TCP connections from a leader to ranks on other hosts, with a hello before the orders."""

import asyncio
import socket
from typing import NamedTuple

import msgspec

from baton.addresses import split_address
from baton.engine.ipc import LENGTH

_MOST_BYTES = 4096
_DEAD_MS = 10_000  # a connection without acknowledgements for so long is broken


class Hello(msgspec.Struct, frozen=True):
    """First bytes of a connection."""

    secret: str
    store: str


class RankAddress(NamedTuple):
    """Address where a rank waits for its leader's engine process."""

    host: str
    port: int
    secret: str

    @classmethod
    def parse(cls, text: str) -> "RankAddress":
        """Parse ``HOST:PORT/SECRET`` into its parts."""
        address, _, secret = text.rpartition("/")
        return cls(*split_address(address), secret)


def connect(address: RankAddress, timeout_s: float) -> socket.socket:
    """Open a connection to a rank."""
    connection = socket.create_connection((address.host, address.port), timeout_s)
    steady(connection)
    return connection


def greet(connection: socket.socket, address: RankAddress, store: str) -> None:
    """Send the hello; orders follow it."""
    body = msgspec.msgpack.encode(Hello(address.secret, store))
    connection.sendall(LENGTH.pack(len(body)) + body)


async def read_hello(connection: socket.socket) -> Hello:
    """Read the hello, and not a byte more."""
    connection.setblocking(False)
    (length,) = LENGTH.unpack(await _exactly(connection, LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"hello of {length} bytes, limit {_MOST_BYTES}")
    return msgspec.msgpack.decode(await _exactly(connection, length), type=Hello)


async def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    got = b""
    while len(got) < size_bytes:
        data = await loop.sock_recv(connection, size_bytes - len(got))
        if not data:
            raise ValueError("the connection ended")
        got += data
    return got


def steady(connection: socket.socket) -> None:
    """Set socket options: small messages are sent at once, and a dead peer ends the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_MS)
