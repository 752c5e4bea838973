"""What a transport of KV must offer, to the side that pulls and to the side that sends.

Whoever pulls gets frames and has them stored; a frame knows how it is checked and written, and
nothing else does. A transport may lose, tear or reorder: ``Frame.store`` believes only a digest
that fits the slice that was asked for. How to add one: ``kvtransfer/transports.py``.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice


class TransportError(Exception):
    """Frames cannot be had this way; the text says why."""


class TransportGoneError(TransportError):
    """The connection to the peer broke, or the peer ended it with an error."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of a prefill worker.

    Args:
        target: As the router named it.
        capabilities: As it said in the handshake, with the transports that it offers.
    """

    target: PrefillTarget
    capabilities: common_pb2.Capabilities

    def offer(self, transport: str) -> common_pb2.TransportOffer | None:
        """What it offers by that name."""
        for offer in self.capabilities.transports:
            if offer.name == transport:
                return offer
        return None


class Frame(Protocol):
    """The answer for one slice."""

    def store(self, pool: PoolView, blocks: Sequence[int], kv_slice: KvSlice, bound: bytes) -> None:
        """Check it against what was asked for and write it into pages; takes time.

        Args:
            pool: Ours.
            blocks: Pages of the prompt's blocks in it.
            kv_slice: What was asked for.
            bound: ``chunk.binding`` of the hand-off.

        Raises:
            ChunkError: It is not what was asked for. Nothing of it is left in the pages.
            GoneError: The peer does not hold the slice (any more).
        """


class FrameStream(Protocol):
    """Frames of one pull, in the order in which they were asked for."""

    async def read(self) -> Sequence[Frame]:
        """The next frames, as many as there are; none when the peer has sent its last one.

        Raises:
            TransportError: There will be no more.
        """

    def close(self) -> None:
        """Stop; to be called when the frames read are stored. May be called more than once."""


class Transport(Protocol):
    """The pulling side; a worker has one object for all its peers.

    ``frame_bytes`` is the size of frames with which it comes near its full rate.
    """

    frame_bytes: int

    def reaches(self, peer: Peer) -> bool:
        """Whether KV of this peer can come this way."""

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Ask a peer for frames."""

    async def close(self) -> None:
        """End all connections that are the transport's own."""


class Loan(Protocol):
    """Pages that somebody else reads."""

    @property
    def chunks(self) -> Sequence[pb.ChunkHeader]:
        """One for each slice asked for: its pages and their digest, or why there are none."""

    def end(self) -> None:
        """Nobody reads them any more; to be called once."""


Room = Callable[[int], Awaitable[memoryview]]
"""Gives memory of that size for one frame, so that its bytes are copied but once. Asked again
before the frame was taken, it is for another frame in its place."""


class FrameSource(Protocol):
    """The sending side: what a worker's pool holds for a hand-off."""

    def frames(self, request: pb.PullRequest, room: Room) -> AsyncIterator[int]:
        """Copies of the slices asked for, in that order, as frames of ``kvtransfer.chunk``.

        Each is in the room that was asked for last; what is yielded is its size.
        """

    async def lend(self, request: pb.PullRequest) -> Loan:
        """The slices asked for, as pages to be read where they are."""

    def may_attach(self, request: pb.PullRequest) -> bool:
        """Whether the pool may be mapped by who asks for this."""


@dataclass(frozen=True, slots=True)
class ServingSide:
    """What a worker has to serve KV with.

    Args:
        grpc_server: Not started yet.
        token: That readers must know.
        incarnation: Of the worker.
        pool_fd: Its KV pool, opened for reading; -1 where ranks have pools of their own.
        listener: A TCP socket that listens for readers; None where KV may not go in plain text.
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
        """What peers must know to pull this way; None if nothing."""

    async def start(self, source: FrameSource) -> None:
        """Begin to serve."""

    async def close(self) -> None:
        """End all connections."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """How to make both sides of a transport.

    Args:
        connect: Makes the pulling side from the worker's channels and the fleet's token.
        serve: Makes the sending side.
        by_default: Whether workers offer it that were not told by what to serve.
    """

    connect: Callable[[Channels, FleetToken], Transport]
    serve: Callable[[ServingSide], TransportServer]
    by_default: bool = True
