"""KV over TCP, the pulling side: the next frame arrives while one is being stored.

A connection carries one pull at a time, and is kept for the next one. Cancelling a pull closes its
connection, since the rest of its frames would come first.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from batonpb import prefill_pb2 as pb

from baton.addresses import split_address
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer.chunk import ByteFrame, PoolView
from kvtransfer.hello import prove_to_worker, receive
from kvtransfer.kv_slice import MOST_FRAME_BYTES, KvSlice
from kvtransfer.tcp.frames import (
    ENDED,
    FAILED,
    NAME,
    Buffers,
    framed,
    port_in,
    prepare,
    receive_length,
)
from kvtransfer.transport import Frame, FrameStream, Peer, TransportError, TransportGoneError

CONNECT_S = 2.0
_KEPT_LINKS = 32  # idle ones, to all peers
_KEPT_BUFFERS = 8


class TcpTransport:
    """Pulls from workers that listen for it.

    Args:
        channels: gRPC channels; if they are encrypted, this transport is not used.
        token: Proved to each sender, never sent.
    """

    frame_bytes = 4 << 20

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self.buffers = Buffers(_KEPT_BUFFERS)
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
