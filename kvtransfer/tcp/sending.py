"""KV over TCP, the sending side: one frame is sent while the next one is being copied."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from google.protobuf.message import DecodeError

from baton.telemetry.tasks import BackgroundTasks
from kvtransfer.hello import prove_to_reader
from kvtransfer.hello_gate import HelloGate
from kvtransfer.pool_source import PoolSource
from kvtransfer.tcp.frames import (
    ENDED,
    FAILED,
    HELLO_S,
    LENGTH,
    NAME,
    Buffers,
    address_of,
    prepare,
    receive_message,
)
from kvtransfer.transport import ServingSide

_LOG = logging.getLogger(__name__)
_KEPT_BUFFERS = 4


class TcpServer:
    """Serves frames to readers that have the fleet's token, if there is a listener."""

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._tasks = BackgroundTasks("tcp")
        self._buffers = Buffers(_KEPT_BUFFERS)

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

        async def serve(link: socket.socket, _: None) -> None:
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
