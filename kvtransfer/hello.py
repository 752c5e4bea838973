"""Mutual proof between a reader and a worker that both have the fleet's token.

    worker   GREETING, a nonce
    reader   a nonce, the reader's proof
    worker   the worker's proof                    then the messages of the transport

A proof is an HMAC of the token over the transport, the worker's incarnation and both nonces. So the
token is never sent, and a proof is valid for one side of one connection. All sizes are fixed: an
unauthenticated peer cannot choose a length. The hello does not protect what follows on the
connection (``docs/guide/security.md``).

Until its hello is done a connection is unauthenticated. It has a deadline, and a worker has at most
`MOST_STRANGERS`: one more ends the oldest, so that silent ones cannot block other readers. Invalid
bytes end their connection and nothing else.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256

from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken

_LOG = logging.getLogger(__name__)

VERSION = 2
"""Part of a worker's offer, so that workers with different hellos do not try to connect."""

GREETING = b"baton-kv %03d\n" % VERSION
NONCE_BYTES = 32
PROOF_BYTES = sha256().digest_size
MOST_STRANGERS = 64
_SHORT_S = 0.1  # between two attempts to accept when descriptors or memory are short
_READER = b"reader"
_WORKER = b"worker"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HelloError(ConnectionError):
    """The other side is refused, or is not the expected worker; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    transport: str
    incarnation: bytes
    worker_nonce: bytes
    reader_nonce: bytes

    def proof(self, token: str, side: bytes) -> bytes:
        parts = (side, self.transport.encode(), self.incarnation)
        signed = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return hmac.digest(
            token.encode(), GREETING + signed + self.worker_nonce + self.reader_nonce, sha256
        )


async def prove_to_worker(
    link: socket.socket, transport: str, incarnation: bytes, token: FleetToken
) -> None:
    """Run the reader's side of the hello, on a fresh, non-blocking connection.

    Raises:
        HelloError: Another version of the hello, another token or another incarnation.
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
    """Run the worker's side of the hello; arguments and errors as for `prove_to_worker`."""
    loop = asyncio.get_running_loop()
    nonce = secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(link, GREETING + nonce)
    answer = await _exactly(link, NONCE_BYTES + PROOF_BYTES)
    reader_nonce = answer[:NONCE_BYTES]
    shown = answer[NONCE_BYTES:]
    meeting = _Meeting(transport, incarnation, nonce, reader_nonce)
    known = [
        each for each in token.valid if hmac.compare_digest(shown, meeting.proof(each, _READER))
    ]
    if not known:
        raise HelloError(f"{transport}: a reader has another token, or expects another incarnation")
    await loop.sock_sendall(link, meeting.proof(known[0], _WORKER))


def check_same_user(link: socket.socket) -> None:
    """Check that the process at the other end of a Unix socket belongs to our user."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise HelloError(f"the other end belongs to user {uid}, this process to {os.geteuid()}")


class HelloGate:
    """Listener that authenticates its connections.

    Args:
        listener: Listening socket; its owner closes it, after the tasks.
        hello: Authenticates a connection, and raises if that fails.
        serve: Serves a connection after its hello, and closes it.
        tasks: Owner of one task for each connection; the caller closes it.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: Callable[[socket.socket], Awaitable[None]],
        serve: Callable[[socket.socket], Awaitable[None]],
        hello_s: float,
        tasks: BackgroundTasks,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._hello = hello
        self._serve = serve
        self._hello_s = hello_s
        self._tasks = tasks
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        short = False
        while True:
            try:
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if not short:
                    _LOG.warning("cannot accept connections, retrying: %s", error)
                short = True
                await asyncio.sleep(_SHORT_S)
                continue
            short = False
            if len(self._strangers) >= MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                self._strangers.pop(oldest).cancel()
            self._strangers[link] = self._tasks.spawn(self._admit(link), "connection")
            await asyncio.sleep(0)  # the task owns the socket from its first line on

    async def _admit(self, link: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            try:
                async with asyncio.timeout(self._hello_s):
                    await self._hello(link)
            except Exception as error:  # noqa: BLE001 - invalid bytes end this connection alone
                _LOG.debug("refused a connection: %s: %s", type(error).__name__, error)
                return
            finally:
                self._strangers.pop(link, None)
            undo.pop_all()
        await self._serve(link)


async def receive(link: socket.socket, into: memoryview) -> None:
    """Fill a buffer."""
    loop = asyncio.get_running_loop()
    while into:
        count = await loop.sock_recv_into(link, into)
        if not count:
            raise ConnectionResetError("the peer closed its socket")
        into = into[count:]


async def _exactly(link: socket.socket, size_bytes: int) -> bytes:
    received = bytearray(size_bytes)
    await receive(link, memoryview(received))
    return bytes(received)
