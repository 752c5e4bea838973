"""KV over separate TCP connections, without gRPC: a hello, then one pull after another.

    reader   hello   pull: PoolRequest.pull                …
    sender   hello   a length and a frame for each slice   …

``kvtransfer/hello.py`` has the hello; its version is part of the offer's address.

Lengths are 4 bytes, little-endian. In place of a frame, `ENDED` means that there are no more, and
`FAILED` that the sender failed. A frame arrives, or is copied, while the one before it is stored or
sent. A connection carries one pull at a time, and is kept for the next one. Cancelling a pull
closes its connection, since the rest of its frames would come first. Messages and bytes are not
encrypted, so the worker of a fleet with TLS does not listen.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from google.protobuf.message import DecodeError

from baton.addresses import split_address
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer import hello
from kvtransfer.chunk import ByteFrame, PoolView
from kvtransfer.hello import HelloGate, prove_to_reader, prove_to_worker, receive
from kvtransfer.kv_slice import MOST_FRAME_BYTES, KvSlice
from kvtransfer.pool_source import PoolSource
from kvtransfer.transport import (
    LENGTH,
    Frame,
    FrameStream,
    Peer,
    ServingSide,
    TransportError,
    TransportGoneError,
    check_message_length,
    framed,
)

_LOG = logging.getLogger(__name__)

NAME = "tcp"
ENDED = 0
FAILED = 0xFFFFFFFF
HELLO_S = 2.0
CONNECT_S = 2.0
_UNACKNOWLEDGED_MS = 20_000  # bytes without an acknowledgement for so long end the connection
_KEPT_LINKS = 32  # idle ones, to all peers
_PULLING_BUFFERS = 8
_SENDING_BUFFERS = 4


def prepare(link: socket.socket) -> None:
    """Set socket options: small messages are sent at once, and a dead peer ends the connection."""
    link.setblocking(False)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


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
    check_message_length(length)
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


class TcpTransport:
    """Pulls from workers that listen for it.

    Args:
        channels: gRPC channels; if they are encrypted, this transport is not used.
        token: Proved to each sender, never sent.
    """

    frame_bytes = 4 << 20

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self.buffers = Buffers(_PULLING_BUFFERS)
        self.tasks = BackgroundTasks("tcp")
        self._plain_text = not channels.encrypted
        self._token = token
        self._idle: list[tuple[bytes, socket.socket]] = []  # by incarnation, the oldest first

    def reaches(self, peer: Peer) -> bool:
        """Return whether the peer listens for the same hello, and TLS is off."""
        offer = peer.offer(NAME)
        return self._plain_text and offer is not None and port_in(offer.address) is not None

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Request frames from a peer."""
        return _TcpFrames(self, peer, request)

    async def link_to(self, peer: Peer) -> socket.socket:
        """Return a connection that carries no pull."""
        for place, (incarnation, link) in enumerate(self._idle):
            if incarnation == peer.target.incarnation:
                del self._idle[place]
                return link
        offer = peer.offer(NAME)
        host, _ = split_address(peer.target.address)
        port = port_in(offer.address) if offer is not None else None
        if port is None:
            raise TransportError(
                f"{peer.target.worker_id} does not offer this version of the hello"
            )
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(CONNECT_S):
                    [(family, *_, address), *_] = await loop.getaddrinfo(
                        host, port, type=socket.SOCK_STREAM
                    )
                    link = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    prepare(link)
                    await loop.sock_connect(link, address)
                    await prove_to_worker(link, NAME, peer.target.incarnation, self._token)
            except OSError as error:  # TimeoutError is one
                reason = str(error) or type(error).__name__
                raise TransportError(f"cannot connect: {reason}") from error
            undo.pop_all()
        return link

    def keep(self, peer: Peer, link: socket.socket) -> None:
        """Keep a connection whose pull has ended, for the next one."""
        self._idle.append((peer.target.incarnation, link))
        while len(self._idle) > _KEPT_LINKS:
            self._idle.pop(0)[1].close()

    async def close(self) -> None:
        """End all pulls and connections."""
        await self.tasks.close()
        while self._idle:
            self._idle.pop()[1].close()


@dataclass(frozen=True, slots=True)
class _TcpFrame:
    """A frame whose buffer is reused once the frame is deleted."""

    frame: ByteFrame
    buffers: Buffers
    buffer: memoryview

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        self.frame.store(pool, blocks, kv_slice, bound)

    def __del__(self) -> None:
        self.buffers.give_back(self.buffer)


class _TcpFrames:
    """A pull; one or two frames are received ahead."""

    def __init__(self, transport: TcpTransport, peer: Peer, request: pb.PullRequest) -> None:
        self._transport = transport
        self._peer = peer
        self._request = request
        self._came: asyncio.Queue[_TcpFrame | TransportError | None] = asyncio.Queue(1)
        self._receiving: asyncio.Task[None] | None = None
        self._over = False

    async def read(self) -> Sequence[Frame]:
        if self._over:
            return []
        if self._receiving is None:
            self._receiving = self._transport.tasks.spawn(self._receive(), "pull")
        came = await self._came.get()
        if isinstance(came, _TcpFrame):
            return [came]
        self._over = True
        if came is None:
            return []
        raise came

    def close(self) -> None:
        self._over = True
        if self._receiving is not None:
            self._receiving.cancel()  # which closes the connection, if it is in use

    async def _receive(self) -> None:
        end = None
        try:
            await self._receive_all(await self._transport.link_to(self._peer))
        except TransportError as error:
            end = error
        await self._came.put(end)

    async def _receive_all(self, link: socket.socket) -> None:
        """Request and receive; keep the connection if the pull ended in order."""
        question = framed(pb.PoolRequest(pull=self._request))
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            try:
                await asyncio.get_running_loop().sock_sendall(link, question)
                end = await self._take_frames(link)
            except OSError as error:
                raise TransportGoneError(str(error) or type(error).__name__) from error
            undo.pop_all()
            self._transport.keep(self._peer, link)
        if end == FAILED:
            raise TransportError("the peer failed to send all frames")

    async def _take_frames(self, link: socket.socket) -> int:
        """Receive all frames, or those before the sender's `ENDED` or `FAILED`; return which."""
        buffers = self._transport.buffers
        for _ in self._request.kv_slices:
            size_bytes = await receive_length(link)
            if size_bytes in (ENDED, FAILED):
                return size_bytes
            if size_bytes > MOST_FRAME_BYTES:
                raise ConnectionError(f"frame of {size_bytes} bytes, limit {MOST_FRAME_BYTES}")
            buffer = buffers.take(size_bytes)
            await receive(link, buffer[:size_bytes])
            frame = ByteFrame(buffer[:size_bytes], self._request.encoding)
            await self._came.put(_TcpFrame(frame, buffers, buffer))
        return ENDED


class TcpServer:
    """Serves frames to readers that have the fleet's token, if there is a listener."""

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._tasks = BackgroundTasks("tcp")
        self._buffers = Buffers(_SENDING_BUFFERS)

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """Port of the listener; the host is the worker's."""
        if self._side.listener is None:
            return None
        port = self._side.listener.getsockname()[1]
        return common_pb2.TransportOffer(name=NAME, address=address_of(port))

    async def start(self, source: PoolSource) -> None:
        """Start accepting connections."""
        if self._side.listener is None:
            return

        async def serve(link: socket.socket) -> None:
            await self._serve(link, source)

        gate = HelloGate(self._side.listener, self._hello, serve, HELLO_S, self._tasks)
        self._tasks.keep(gate.run, "accept")

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        await self._tasks.close()
        if self._side.listener is not None:
            self._side.listener.close()

    async def _hello(self, link: socket.socket) -> None:
        prepare(link)
        await prove_to_reader(link, NAME, self._side.incarnation, self._side.token)

    async def _serve(self, link: socket.socket, source: PoolSource) -> None:
        with link, contextlib.suppress(OSError, DecodeError):
            while True:
                request = pb.PoolRequest.FromString(await receive_message(link)).pull
                await self._answer(link, request, source)

    async def _answer(
        self, link: socket.socket, request: pb.PullRequest, source: PoolSource
    ) -> None:
        """Send the frames of one pull, and the reason if there are fewer than requested."""
        left = len(request.kv_slices)
        why = ENDED
        rooms = _Rooms(self._buffers)
        written = None
        frames = source.frames(request, rooms.room)
        while True:
            size_bytes, sent = await asyncio.gather(
                _next(frames), self._send(link, written), return_exceptions=True
            )
            if isinstance(sent, BaseException):
                raise sent
            if isinstance(size_bytes, BaseException):  # of the source: other pulls continue
                _LOG.error(
                    "failed to serve a pull request=%s", request.request_id, exc_info=size_bytes
                )
                why = FAILED
                break
            if not size_bytes:
                break
            written = rooms.take(size_bytes)
            left -= 1
        if left:
            await asyncio.get_running_loop().sock_sendall(link, LENGTH.pack(why))

    async def _send(self, link: socket.socket, written: "_Written | None") -> None:
        if written is not None:
            buffer, size_bytes = written
            await asyncio.get_running_loop().sock_sendall(link, buffer[:size_bytes])
            self._buffers.give_back(buffer)


_Written = tuple[memoryview, int]


async def _next(frames: AsyncIterator[int]) -> int:
    return await anext(frames, 0)


class _Rooms:
    """Buffers for frames with their lengths in front."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._buffer: memoryview | None = None  # being written

    async def room(self, size_bytes: int) -> memoryview:
        size_bytes += LENGTH.size
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._buffer = self._buffers.take(size_bytes)
        return self._buffer[LENGTH.size : size_bytes]

    def take(self, size_bytes: int) -> _Written:
        """Return the written buffer, with its length filled in, and its size in bytes."""
        buffer = self._buffer
        self._buffer = None
        if buffer is None:
            raise RuntimeError("a frame was yielded without room for it")
        buffer[: LENGTH.size] = LENGTH.pack(size_bytes)
        return buffer, LENGTH.size + size_bytes
