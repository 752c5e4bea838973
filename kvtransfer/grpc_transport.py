"""gRPC byte transport: raw frames on ``/baton.v1.KvTransfer/Pull``."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from batonpb import prefill_pb2 as pb
from batonpb.common_pb2 import ChunkEncoding

from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer.chunk import ByteFrame
from kvtransfer.pool_source import PoolSource
from kvtransfer.transport import (
    Frame,
    FrameStream,
    Peer,
    ServingSide,
    TransportGoneError,
)

_NEW_BYTES = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_ADDRESS = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)
SERVICE = "baton.v1.KvTransfer"
PULL = f"/{SERVICE}/Pull"


class GrpcTransport:
    """Pulls over the channel that the control streams to the same peer use.

    Args:
        channels: Channels of this worker; their owner closes them.
    """

    frame_bytes = 4 << 20  # in smaller frames the cost of each frame matters more

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self._channels = channels
        self._token = token

    def reaches(self, peer: Peer) -> bool:
        """Return whether the peer has an address; every worker has."""
        return bool(peer.target.address)

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Request frames from a peer."""
        method: Any = self._channels.to(peer.target.address).unary_stream(
            PULL, request_serializer=pb.PullRequest.SerializeToString
        )
        return _GrpcFrames(method(request, metadata=self._token.metadata), request.encoding)

    async def close(self) -> None:
        """Do nothing: the channels are not this transport's own."""


@dataclass(frozen=True, slots=True)
class _GrpcFrames:
    call: "grpc.aio.UnaryStreamCall[Any, bytes]"
    encoding: ChunkEncoding

    async def read(self) -> Sequence[Frame]:
        try:
            frame = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise TransportGoneError(str(error)) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # this task is cancelled, not the call
            raise TransportGoneError("the channel was closed") from error
        if not isinstance(frame, bytes):
            return []  # gRPC's mark for the end of the stream
        return [ByteFrame(frame, self.encoding)]

    def close(self) -> None:
        self.call.cancel()


class _Message:
    """Memory for one message at a time: gRPC accepts only ``bytes``.

    The object is created uninitialised and written once, before other code sees it; Python's C API
    allows that. Code that still writes into the memory holds a reference to it.
    """

    def __init__(self) -> None:
        self._message = b""

    async def room(self, size_bytes: int) -> memoryview:
        self._message = _NEW_BYTES(None, size_bytes)
        return np.asarray(_Writable(self._message)).data

    def take(self) -> bytes:
        message = self._message
        self._message = b""
        return message


class _Writable:
    """Memory of a bytes object, as numpy asks for it."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        address = _ADDRESS(message)
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (len(message),),
            "typestr": "|u1",
        }


class GrpcServer:
    """Serves ``PULL`` with the unchanged bytes of the source.

    Args:
        side: Resources of this worker; the owner of its gRPC server starts and stops it.
    """

    offer = None  # peers need only the address

    def __init__(self, side: ServingSide) -> None:
        self._server = side.grpc_server

    async def start(self, source: PoolSource) -> None:
        """Add the method to the server."""

        async def pull(request: pb.PullRequest, _: Any) -> AsyncIterator[bytes]:
            message = _Message()
            async for _size_bytes in source.frames(request, message.room):
                yield message.take()

        rpc: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            pull, request_deserializer=pb.PullRequest.FromString
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Pull": rpc})
        self._server.add_generic_rpc_handlers((handler,))

    async def close(self) -> None:
        """Do nothing: the method ends with the server."""
