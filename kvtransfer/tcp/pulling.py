"""KV over TCP, the pulling side: the next frame comes in while one is being stored.

A connection carries one pull at a time, and is kept for the next one. A pull that is called off
before its end takes its connection along, since the rest of its frames would come first.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

from batonpb import prefill_pb2 as pb

from kvtransfer.chunk import ByteFrame, PoolView
from kvtransfer.kv_slice import KvSlice
from kvtransfer.tcp.frames import (
    ENDED,
    FAILED,
    MOST_FRAME_BYTES,
    NAME,
    Buffers,
    framed,
    prepare,
    receive,
    receive_length,
)
from kvtransfer.transport import Frame, FrameStream, Peer, TransportError, TransportGoneError
from wire.fleet_token import FleetToken
from wire.grpc_channels import Channels

CONNECT_S = 2.0
_KEPT_LINKS = 32  # idle ones, to all peers
_KEPT_BUFFERS = 8


class TcpTransport:
    """Pulls from workers that listen for it.

    Args:
        channels: Say whether this fleet has TLS: then nothing is pulled this way.
        token: Shown to each sender.
    """

    frame_bytes = 4 << 20

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self.buffers = Buffers(_KEPT_BUFFERS)
        self._plain_text = not channels.encrypted
        self._token = token
        self._idle: list[tuple[bytes, socket.socket]] = []  # by incarnation, the oldest first
        self._pulls: set[_TcpFrames] = set()

    def reaches(self, peer: Peer) -> bool:
        """Whether it listens, and plain text will do."""
        return self._plain_text and peer.offer(NAME) is not None

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Ask a peer for frames."""
        frames = _TcpFrames(self, peer, request)
        self._pulls.add(frames)
        return frames

    async def link_to(self, peer: Peer) -> socket.socket:
        """A connection that carries no pull.

        Raises:
            TransportError: It cannot be had.
        """
        for place, (incarnation, link) in enumerate(self._idle):
            if incarnation == peer.target.incarnation:
                del self._idle[place]
                return link
        offer = peer.offer(NAME)
        host = peer.target.address.rpartition(":")[0].strip("[]")
        if offer is None or not offer.address.isdecimal():
            raise TransportError(f"{peer.target.worker_id} does not listen")
        hello = pb.PoolAttach(fleet_token=self._token.shown, incarnation=peer.target.incarnation)
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            try:
                async with asyncio.timeout(CONNECT_S):
                    [(family, *_, address), *_] = await loop.getaddrinfo(
                        host, int(offer.address), type=socket.SOCK_STREAM
                    )
                    link = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    prepare(link)
                    await loop.sock_connect(link, address)
                    await loop.sock_sendall(link, framed(pb.PoolRequest(attach=hello)))
            except OSError as error:  # TimeoutError is one
                reason = str(error) or type(error).__name__
                raise TransportError(f"no connection: {reason}") from error
            undo.pop_all()
        return link

    def keep(self, peer: Peer, link: socket.socket) -> None:
        """A connection whose pull has ended, for the next one."""
        self._idle.append((peer.target.incarnation, link))
        while len(self._idle) > _KEPT_LINKS:
            self._idle.pop(0)[1].close()

    def forget(self, frames: "_TcpFrames") -> None:
        """That pull is closed."""
        self._pulls.discard(frames)

    async def close(self) -> None:
        """End all pulls and connections."""
        pulls = list(self._pulls)
        for frames in pulls:
            frames.close()
        await asyncio.gather(*(frames.ended() for frames in pulls))
        while self._idle:
            self._idle.pop()[1].close()


class _TcpFrame:
    """A frame in a buffer that is used again once nobody holds the frame."""

    def __init__(self, frame: ByteFrame, buffers: Buffers, buffer: memoryview) -> None:
        self._frame = frame
        self._buffers = buffers
        self._buffer = buffer

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """See ``transport.Frame``."""
        self._frame.store(pool, blocks, kv_slice, bound)

    def __del__(self) -> None:
        self._buffers.give_back(self._buffer)


class _TcpFrames:
    """One pull."""

    def __init__(self, transport: TcpTransport, peer: Peer, request: pb.PullRequest) -> None:
        self._transport = transport
        self._peer = peer
        self._request = request
        self._link: socket.socket | None = None
        self._coming: asyncio.Task[Frame | None] | None = None
        self._left = len(request.kv_slices)
        self._ended = False

    async def read(self) -> Sequence[Frame]:
        if self._ended:
            return []
        if self._coming is None:
            self._coming = asyncio.create_task(self._begin())
        frame = await asyncio.shield(self._coming)
        if frame is None:
            self._ended = True
            return []
        if not self._ended:  # it may have been closed meanwhile
            self._coming = asyncio.create_task(self._next())
        return [frame]

    def close(self) -> None:
        self._ended = True
        self._transport.forget(self)
        coming, link = self._coming, self._link
        self._link = None
        if coming is not None and not coming.done():
            coming.cancel()
            if link is not None:  # only then: its number may be another socket's at once
                coming.add_done_callback(lambda _: link.close())
            return
        if coming is not None and not coming.cancelled():
            coming.exception()  # marks it as seen
        if link is not None:
            link.close()

    async def ended(self) -> None:
        """After `close`: nothing is under way any more."""
        if self._coming is not None:
            await asyncio.wait([self._coming])

    async def _begin(self) -> Frame | None:
        link = self._link = await self._transport.link_to(self._peer)
        question = framed(pb.PoolRequest(pull=self._request))
        with _closing_if_it_fails(link):
            await asyncio.get_running_loop().sock_sendall(link, question)
        return await self._next()

    async def _next(self) -> Frame | None:
        """The next frame; None behind the last."""
        link, buffers = self._link, self._transport.buffers
        if link is None:
            return None
        with _closing_if_it_fails(link):
            size_bytes = await receive_length(link)
            if size_bytes in (ENDED, FAILED):
                self._let_go(link)
                if size_bytes == FAILED:
                    raise TransportError("the peer could not go on")
                return None
            if size_bytes > MOST_FRAME_BYTES:
                raise ConnectionError(f"a frame of {size_bytes} bytes")
            buffer = buffers.take(size_bytes)
            await receive(link, buffer[:size_bytes])
        self._left -= 1
        if not self._left:
            self._let_go(link)
        frame = ByteFrame(buffer[:size_bytes], self._request.encoding)
        return _TcpFrame(frame, buffers, buffer)

    def _let_go(self, link: socket.socket) -> None:
        """The pull has ended, and the connection is there for the next one."""
        self._link = None
        self._transport.keep(self._peer, link)


@contextlib.contextmanager
def _closing_if_it_fails(link: socket.socket) -> Iterator[None]:
    """A connection that broke, or was left in the middle of something, carries nothing more."""
    try:
        yield
    except OSError as error:
        link.close()
        raise TransportGoneError(str(error) or type(error).__name__) from error
    except asyncio.CancelledError:
        link.close()
        raise
