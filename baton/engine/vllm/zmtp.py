"""ZeroMQ's wire protocol (ZMTP 3.0, no security) for one client socket, without I/O.

vLLM publishes its KV events on a PUB socket and repeats them on a ROUTER socket. A client needs
only the greeting, the READY command and frames, so no ZeroMQ library is used.
"""

from baton.types.errors import InternalError

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_BYTES = 64
_MORE = 1
_LONG = 2
_COMMAND = 4


def message(*parts: bytes) -> bytes:
    """Return the bytes of a message with these parts."""
    last = len(parts) - 1
    return b"".join(_frame(part, _MORE if n < last else 0) for n, part in enumerate(parts))


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


SUBSCRIBE_ALL = message(b"\x01")
"""Message that subscribes a SUB socket to all topics."""


class ZmtpPeer:
    """State of one connection.

    Attributes:
        hello: Bytes to send when the connection opens.
        ready: Whether the handshake is complete.
    """

    def __init__(self, socket_type: str) -> None:
        mechanism = b"NULL".ljust(20, b"\0")
        greeting = _SIGNATURE + b"\x03\x00" + mechanism + bytes(32)
        name = b"Socket-Type"
        value = socket_type.encode()
        metadata = bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        self.hello = greeting + _frame(b"\x05READY" + metadata, _COMMAND)
        self.ready = False
        self._buffer = bytearray()
        self._greeted = False
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Add received bytes and return the complete messages, each as its parts.

        Raises:
            InternalError: The peer does not speak ZMTP 3 without security.
        """
        self._buffer += data
        if not self._greeted and not self._greet():
            return []
        messages: list[list[bytes]] = []
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._command(body)
                continue
            self._parts.append(body)
            if not flags & _MORE:
                messages.append(self._parts)
                self._parts = []
        return messages

    def _greet(self) -> bool:
        if len(self._buffer) < _GREETING_BYTES:
            return False
        greeting = bytes(self._buffer[:_GREETING_BYTES])
        del self._buffer[:_GREETING_BYTES]
        if greeting[0] != 0xFF or greeting[10] < 3 or not greeting[12:].startswith(b"NULL\0"):
            raise InternalError(f"the peer does not speak ZMTP 3 with NULL: {greeting[:32]!r}")
        self._greeted = True
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        head = 9 if self._buffer and self._buffer[0] & _LONG else 2
        if len(self._buffer) < head:
            return None
        length = int.from_bytes(self._buffer[1:head], "big")
        if len(self._buffer) < head + length:
            return None
        flags = self._buffer[0]
        body = bytes(self._buffer[head : head + length])
        del self._buffer[: head + length]
        return flags, body

    def _command(self, body: bytes) -> None:
        if body.startswith(b"\x05ERROR"):
            raise InternalError(f"the ZeroMQ peer refused the connection: {body[6:]!r}")
        self.ready = self.ready or body.startswith(b"\x05READY")
