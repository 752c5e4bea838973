"""Options of gRPC channels, and the fleet token that every call to a worker carries."""

from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import Any

import grpc
import grpc.aio

TOKEN_KEY = "x-baton-fleet-token"  # noqa: S105 - the name of the header, not a token


_MESSAGE_BYTES = 16 << 20
WORKER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
"""Of a worker's server, and of its channels to other workers: keep-alives notice a cut."""


ROUTER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Two routers in one test process must not share a connection: one may be cut.
    ("grpc.use_local_subchannel_pool", 1),
]
"""Of a router's channel to a worker: the link has heartbeats of its own."""


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker, with keep-alives that notice a cut within seconds."""
    return grpc.aio.insecure_channel(address, options=WORKER_OPTIONS)


def token_metadata(fleet_token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that every call to a worker carries."""
    return ((TOKEN_KEY, fleet_token),)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the fleet token."""

    def __init__(self, fleet_token: str) -> None:
        self._fleet_token = fleet_token.encode()

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the fleet token is missing or wrong"
            )

        self._refuse_unary: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            refuse
        )
        self._refuse_stream: grpc.RpcMethodHandler[Any, Any] = (
            grpc.stream_stream_rpc_method_handler(refuse)
        )
        self._refuse_pull: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            refuse
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let a call through, or answer UNAUTHENTICATED in the shape that the method has."""
        metadata: Sequence[Any] = handler_call_details.invocation_metadata or ()
        tokens = [value for key, value in metadata if key == TOKEN_KEY and isinstance(value, str)]
        if any(compare_digest(token.encode(), self._fleet_token) for token in tokens):
            return await continuation(handler_call_details)
        rpc = await continuation(handler_call_details)
        if rpc is None or not (rpc.request_streaming or rpc.response_streaming):
            return self._refuse_unary
        return self._refuse_stream if rpc.request_streaming else self._refuse_pull
