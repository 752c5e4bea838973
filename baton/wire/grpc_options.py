"""Options and TLS of all gRPC channels and servers."""

from typing import Any

import grpc.aio

from baton.config.watched_files import WatchedFiles
from baton.folders import read_small
from baton.wire.tls import FleetTls

_MESSAGE_BYTES = 16 << 20
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Option of every channel inside a fleet: gRPC takes proxies from the environment otherwise."""
WORKER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    NO_PROXY,
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
"""Options of a worker's channels to other workers: keep-alives detect cuts."""


SERVER_OPTIONS: list[tuple[str, Any]] = [
    *WORKER_OPTIONS,
    ("grpc.so_reuseport", 0),
    # Bounds for callers without the token: at most 64 KiB are received before it is checked.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # Connections without a handshake, or without calls.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_allowed_incoming_connections", 4096),
    ("grpc.max_concurrent_streams", 4096),
]
"""Options of the server of a worker or rank."""


ROUTER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    NO_PROXY,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # gRPC would buffer megabytes of small frames for a router that is behind, whose tokens would be
    # a second old. With a small window the worker merges them into the frame that is next.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    # Two routers in one test process must not share a connection: one may be cut.
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a router's channel to a worker, which has heartbeats of its own."""


def open_channel(
    address: str,
    tls: FleetTls | None = None,
    options: list[tuple[str, Any]] = WORKER_OPTIONS,
) -> grpc.aio.Channel:
    """Open a channel to a worker, in plain text without ``tls``."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    name = ("grpc.ssl_target_name_override", tls.name)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, name])


def listen(server: grpc.aio.Server, address: str, tls: FleetTls | None = None) -> int:
    """Add a port (0 takes a free one) to a server that is not started yet, and return the port."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials())


def listen_for_gateways(server: grpc.aio.Server, address: str, *files: str) -> None:
    """Add a port with the ``files`` of a certificate and its key, read again when they change."""
    if not files:
        server.add_insecure_port(address)
        return

    def read() -> grpc.ServerCertificateConfiguration:
        certificate, key = map(read_small, files)
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    pair = WatchedFiles(files, read)
    credentials = grpc.dynamic_ssl_server_credentials(pair.current, lambda: pair.current)
    server.add_secure_port(address, credentials)
