"""How a reader and a worker prove to each other that they have the fleet's token.

    worker   GREETING, a nonce
    reader   a nonce, the reader's proof
    worker   the worker's proof                    then whatever the transport says

A proof is an HMAC of the token over the transport, the worker's incarnation and both nonces, so the
token is never sent, and a proof fits one side of one connection. All is of a fixed size: a stranger
names no length. What follows on the connection is not protected by it (``docs/guide/security.md``).
"""

import asyncio
import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from hashlib import sha256

from baton.wire.fleet_token import FleetToken

VERSION = 2
"""Part of what a worker offers, so that workers with different hellos do not try to connect."""

GREETING = b"baton-kv %03d\n" % VERSION
NONCE_BYTES = 32
PROOF_BYTES = sha256().digest_size
_READER = b"reader"
_WORKER = b"worker"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HelloError(ConnectionError):
    """The other side is not let in, or is not who was meant; the text says why."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    transport: str
    incarnation: bytes
    worker_nonce: bytes
    reader_nonce: bytes

    def proof(self, token: str, side: bytes) -> bytes:
        """Of one side that has this token."""
        parts = (side, self.transport.encode(), self.incarnation)
        said = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return hmac.digest(
            token.encode(), GREETING + said + self.worker_nonce + self.reader_nonce, sha256
        )


async def prove_to_worker(
    link: socket.socket, transport: str, incarnation: bytes, token: FleetToken
) -> None:
    """The reader's side.

    Args:
        link: A connection on which nothing was said; not blocking.
        transport: By its name.
        incarnation: Of the worker that is meant.
        token: The fleet's.

    Raises:
        HelloError: Another version of the hello, another token or another life.
        OSError: The connection ended.
    """
    greeting = await _exactly(link, len(GREETING) + NONCE_BYTES)
    version = greeting[: len(GREETING)]
    nonce = greeting[len(GREETING) :]
    if version != GREETING:
        raise HelloError(f"{transport}: the peer greets with {version!r} instead of {GREETING!r}")
    meeting = _Meeting(transport, incarnation, nonce, secrets.token_bytes(NONCE_BYTES))
    shown = token.shown
    proof = meeting.proof(shown, _READER)
    await asyncio.get_running_loop().sock_sendall(link, meeting.reader_nonce + proof)
    answer = await _exactly(link, PROOF_BYTES)
    if not hmac.compare_digest(answer, meeting.proof(shown, _WORKER)):
        raise HelloError(f"{transport}: the peer cannot prove that it has the fleet's token")


async def prove_to_reader(
    link: socket.socket, transport: str, incarnation: bytes, token: FleetToken
) -> None:
    """The worker's side; arguments and errors as for `prove_to_worker`."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(link, GREETING + nonce)
    said = await _exactly(link, NONCE_BYTES + PROOF_BYTES)
    reader_nonce = said[:NONCE_BYTES]
    shown = said[NONCE_BYTES:]
    meeting = _Meeting(transport, incarnation, nonce, reader_nonce)
    known = [
        each for each in token.valid if hmac.compare_digest(shown, meeting.proof(each, _READER))
    ]
    if not known:
        raise HelloError(f"{transport}: a reader has another token, or means another life")
    await loop.sock_sendall(link, meeting.proof(known[0], _WORKER))


def check_same_user(link: socket.socket) -> None:
    """Whether a process of our user is at the other end of a Unix socket, or listened there.

    Raises:
        HelloError: It is another user's.
    """
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise HelloError(f"the other end belongs to user {uid}, this process to {os.geteuid()}")


async def receive(link: socket.socket, into: memoryview) -> None:
    """Fill a buffer.

    Raises:
        OSError: The connection ended before it was full.
    """
    loop = asyncio.get_running_loop()
    while into:
        count = await loop.sock_recv_into(link, into)
        if not count:
            raise ConnectionResetError("the peer closed its socket")
        into = into[count:]


async def _exactly(link: socket.socket, size_bytes: int) -> bytes:
    found = bytearray(size_bytes)
    await receive(link, memoryview(found))
    return bytes(found)
