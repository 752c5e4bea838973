"""The transports that there are. To add one: a file beside ``grpc_transport.py``, a line here."""

from collections.abc import Sequence

from batonpb.decode_pb2 import PrefillTarget

from kvtransfer import grpc_transport
from kvtransfer.transport import Transport, TransportError, TransportKind

TRANSPORTS: dict[str, TransportKind] = {
    "grpc": TransportKind(grpc_transport.GrpcTransport, grpc_transport.serve),
}
"""By name, best first: a pull takes the first one that reaches the peer. gRPC reaches all."""


def transport_to(peer: PrefillTarget, transports: Sequence[Transport]) -> Transport:
    """The best transport to a peer.

    Raises:
        TransportError: None of them reaches it.
    """
    for transport in transports:
        if transport.reaches(peer):
            return transport
    raise TransportError(f"no transport reaches {peer.worker_id}")
