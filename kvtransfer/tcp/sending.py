"""KV over TCP, the sending side: one frame is on its way while the next one is being copied."""

import asyncio
import contextlib
import logging
import socket

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from google.protobuf.message import DecodeError

from kvtransfer.tcp.frames import (
    ENDED,
    FAILED,
    HELLO_S,
    LENGTH,
    NAME,
    Buffers,
    prepare,
    receive_message,
)
from kvtransfer.transport import FrameSource, ServingSide
from telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)
_KEPT_BUFFERS = 4


class TcpServer:
    """Serves frames to whoever knows the fleet's token.

    Args:
        side: Of this worker; without a listener it offers nothing.
    """

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        if side.listener is not None:
            side.listener.setblocking(False)
        self._tasks = BackgroundTasks("tcp")
        self._buffers = Buffers(_KEPT_BUFFERS)

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """The port; the host is the worker's."""
        if self._side.listener is None:
            return None
        port = self._side.listener.getsockname()[1]
        return common_pb2.TransportOffer(name=NAME, address=str(port))

    async def start(self, source: FrameSource) -> None:
        """Listen."""
        if self._side.listener is not None:
            self._tasks.keep(lambda: self._accept(self._side.listener, source), "accept")

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        await self._tasks.close()
        if self._side.listener is not None:
            self._side.listener.close()

    async def _accept(self, listener: socket.socket | None, source: FrameSource) -> None:
        loop = asyncio.get_running_loop()
        while listener is not None:
            link, _ = await loop.sock_accept(listener)
            self._tasks.spawn(self._serve(link, source), "reader")

    async def _serve(self, link: socket.socket, source: FrameSource) -> None:
        """One reader, until it goes."""
        with link, contextlib.suppress(OSError, DecodeError):
            prepare(link)
            async with asyncio.timeout(HELLO_S):  # TimeoutError is an OSError
                hello = pb.PoolRequest.FromString(await receive_message(link)).attach
            if not self._side.token.accepts(hello.fleet_token):
                return
            if hello.incarnation != self._side.incarnation:
                return
            while True:
                request = pb.PoolRequest.FromString(await receive_message(link)).pull
                await self._answer(link, request, source)

    async def _answer(
        self, link: socket.socket, request: pb.PullRequest, source: FrameSource
    ) -> None:
        """The frames of one pull; if there are fewer than were asked for, why."""
        outlet, left, why = _Outlet(link, self._buffers), len(request.kv_slices), ENDED
        try:
            async for size_bytes in source.frames(request, outlet.room):
                await outlet.send(size_bytes)
                left -= 1
        except OSError:
            raise  # the connection's end
        except Exception:  # noqa: BLE001 - of the source: other pulls go on
            _LOG.exception("a pull of %s broke", request.request_id)
            why = FAILED
        finally:
            await outlet.end()
        if left:
            await asyncio.get_running_loop().sock_sendall(link, LENGTH.pack(why))


class _Outlet:
    """Two buffers: what is in one of them is sent while the other is written.

    Args:
        link: To the reader.
        buffers: Where they come from.
    """

    def __init__(self, link: socket.socket, buffers: Buffers) -> None:
        self._link = link
        self._buffers = buffers
        self._buffer: memoryview | None = None  # that is written
        self._sending: asyncio.Task[None] | None = None

    async def room(self, size_bytes: int) -> memoryview:
        """See ``transport.Room``."""
        size_bytes += LENGTH.size
        if self._buffer is None or len(self._buffer) < size_bytes:
            self._buffer = self._buffers.take(size_bytes)
        return self._buffer[LENGTH.size : size_bytes]

    async def send(self, size_bytes: int) -> None:
        """Send what was written, once what came before it is sent."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise RuntimeError("a frame without room")
        buffer[: LENGTH.size] = LENGTH.pack(size_bytes)
        await self.end()
        self._sending = asyncio.create_task(self._send(buffer, LENGTH.size + size_bytes))

    async def end(self) -> None:
        """Wait until all is sent; raises OSError where it could not be."""
        if self._sending is not None:
            await self._sending

    async def _send(self, buffer: memoryview, size_bytes: int) -> None:
        await asyncio.get_running_loop().sock_sendall(self._link, buffer[:size_bytes])
        self._buffers.give_back(buffer)
