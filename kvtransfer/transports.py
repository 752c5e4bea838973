"""All transports. To add one, add a file beside ``grpc_transport.py`` and a line here."""

from collections.abc import Collection

from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer import grpc_transport, shared_memory, tcp
from kvtransfer.edge import FALLBACK
from kvtransfer.pair import pulling, sending
from kvtransfer.transport import ServingSide, Transport, TransportKind, TransportServer

CARRY_INT8 = (tcp.NAME, FALLBACK)
"""Transports whose frames may be in int8 (``kvtransfer/int8_chunks.py``)."""

TRANSPORTS: dict[str, TransportKind] = {
    shared_memory.NAME: TransportKind(
        shared_memory.SharedMemoryTransport, shared_memory.SharedMemoryServer
    ),
    tcp.NAME: TransportKind(tcp.TcpTransport, tcp.TcpServer),
    sending.NAME: TransportKind(pulling.PairTransport, sending.PairServer, by_default=False),
    FALLBACK: TransportKind(grpc_transport.GrpcTransport, grpc_transport.GrpcServer),
}
"""All kinds by name, best first unless measured otherwise (``kvtransfer/edge.py``)."""


def connect_all(channels: Channels, token: FleetToken) -> dict[str, Transport]:
    """Return the pulling side of every transport, best first."""
    return {name: kind.connect(channels, token) for name, kind in TRANSPORTS.items()}


def servers(side: ServingSide, names: Collection[str] = ()) -> list[TransportServer]:
    """Return the named transports' sending sides, or the default ones; always the fallback."""
    return [
        kind.serve(side)
        for name, kind in TRANSPORTS.items()
        if name == FALLBACK or (name in names if names else kind.by_default)
    ]
