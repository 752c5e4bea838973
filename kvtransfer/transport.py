"""What a transport of KV frames must offer, to the side that pulls and to the side that sends.

A transport carries frames (``kvtransfer.chunk``) as bytes and knows nothing of what is in them. It
may lose, tear or reorder: whoever pulls checks digests and slices. How to add one:
``kvtransfer/transports.py``.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget

from wire.grpc_channels import Channels


class TransportError(Exception):
    """Frames cannot be had this way; the text says why."""


class TransportGoneError(TransportError):
    """The connection to the peer broke, or the peer ended it with an error."""


class FrameStream(Protocol):
    """Frames of one pull, in the order in which they were asked for."""

    async def read(self) -> bytes | None:
        """The next frame; None when the peer has sent its last one.

        Raises:
            TransportError: There will be no more.
        """

    def close(self) -> None:
        """Stop; whatever is on its way is dropped. May be called more than once."""


class Transport(Protocol):
    """The pulling side; a worker has one object for all its peers."""

    def reaches(self, peer: PrefillTarget) -> bool:
        """Whether frames of this peer can come this way."""

    def pull(self, peer: PrefillTarget, request: pb.PullRequest) -> FrameStream:
        """Ask a peer for frames."""

    async def close(self) -> None:
        """End all connections that are the transport's own."""


FrameSource = Callable[[pb.PullRequest], AsyncIterator[bytes]]
"""The sending side: frames of the slices asked for, in that order."""


@dataclass(frozen=True, slots=True)
class TransportKind:
    """How to make both sides of a transport.

    Args:
        connect: Makes the pulling side from the worker's channels and the fleet token.
        serve: Offers a source of frames beside (or through) the worker's gRPC server.
    """

    connect: Callable[[Channels, str], Transport]
    serve: Callable[[grpc.aio.Server, FrameSource], None]
