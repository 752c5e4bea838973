"""Interface of KV transports, for the side that pulls and the side that sends.

The puller gets frames and stores them. A frame itself checks and writes its bytes. A
transport may lose, tear or reorder frames: ``Frame.store`` accepts only a digest that matches the
requested slice. To add a transport, see ``kvtransfer/transports.py``.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget
from google.protobuf.message import DecodeError, Message

from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice
from kvtransfer.pool_source import PoolSource

LENGTH = struct.Struct("<I")
"""Length before each message of a transport with sockets of its own."""

MOST_MESSAGE_BYTES = 4 << 20


class TransportError(Exception):
    """Frames cannot be pulled this way; the text gives the reason."""


class TransportGoneError(TransportError):
    """The connection to the peer broke, or the peer ended it with an error."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An incarnation of a prefill worker.

    Args:
        capabilities: Capabilities from the handshake, with the offered transports.
    """

    target: PrefillTarget
    capabilities: common_pb2.Capabilities

    def offer(self, transport: str) -> common_pb2.TransportOffer | None:
        """Return the worker's offer of a transport, or None."""
        for offer in self.capabilities.transports:
            if offer.name == transport:
                return offer
        return None


class Frame(Protocol):
    """Response for one slice."""

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """Check the frame against the request and write it into the pages of ``blocks``.

        It blocks, so it runs in a thread. ``bound`` is the ``chunk.binding`` of the KV transfer.

        Raises:
            ChunkError: It does not match. Nothing of it is left in the pages.
            GoneError: The peer does not hold the slice (any more).
        """


class FrameStream(Protocol):
    """Frames of one pull, in the order of the request."""

    async def read(self) -> Sequence[Frame]:
        """Return the next frames, as many as there are; none after the peer's last one.

        Raises:
            TransportError: There will be no more.
        """

    def close(self) -> None:
        """Stop; call this when the frames read are stored. It may be called more than once."""


class Transport(Protocol):
    """The pulling side; a worker has one object for all its peers.

    ``frame_bytes`` is the size of frames with which it comes near its full rate.
    """

    frame_bytes: int

    def reaches(self, peer: Peer) -> bool:
        """Return whether KV of this peer can be pulled this way."""

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Request frames from a peer."""

    async def close(self) -> None:
        """Close all connections that belong to the transport."""


@dataclass(frozen=True, slots=True)
class ServingSide:
    """Resources with which a worker serves KV.

    Args:
        grpc_server: Server that is not started yet.
        token: Token that readers must have.
        pool_fd: Its KV pool, opened for reading; -1 where ranks have separate pools.
        listener: TCP socket that listens for readers; None if KV must be encrypted.
    """

    grpc_server: grpc.aio.Server
    token: FleetToken
    incarnation: bytes
    pool_fd: int
    listener: socket.socket | None = None


class TransportServer(Protocol):
    """The sending side of one transport."""

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """Information that peers need to pull this way; None if they need none."""

    async def start(self, source: PoolSource) -> None:
        """Start serving from ``source``."""

    async def close(self) -> None:
        """End all connections and loans."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Factories of both sides of a transport.

    Args:
        by_default: Whether workers offer it unless their settings name transports.
    """

    connect: Callable[[Channels, FleetToken], Transport]
    serve: Callable[[ServingSide], TransportServer]
    by_default: bool = True


def framed(message: Message) -> bytes:
    """Return a message with its length before it."""
    body = message.SerializeToString()
    return LENGTH.pack(len(body)) + body


def check_message_length(length: int) -> None:
    """Raise DecodeError for a message that is longer than any valid one."""
    if length > MOST_MESSAGE_BYTES:
        raise DecodeError(f"message of {length} bytes, limit {MOST_MESSAGE_BYTES}")
