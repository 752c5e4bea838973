"""The gRPC byte transport: raw frames on ``/baton.v1.KvTransfer/Pull``, and call metadata."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from batonpb import prefill_pb2 as pb

SERVICE = "baton.v1.KvTransfer"
PULL = f"/{SERVICE}/Pull"
TOKEN_KEY = "x-baton-fleet-token"  # noqa: S105 - the name of the header, not a token

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

PullHandler = Callable[[pb.PullRequest, Any], AsyncIterator[bytes]]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a worker, with keep-alives that notice a cut within seconds."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def token_metadata(fleet_token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that every call to a worker carries."""
    return ((TOKEN_KEY, fleet_token),)


def pull_stream(
    channel: grpc.aio.Channel, request: pb.PullRequest, fleet_token: str
) -> "grpc.aio.UnaryStreamCall[Any, bytes]":
    """Ask for frames; yields raw bytes (see ``kvtransfer.chunk.decode``)."""
    method: Any = channel.unary_stream(PULL, request_serializer=pb.PullRequest.SerializeToString)
    call: grpc.aio.UnaryStreamCall[Any, bytes] = method(
        request, metadata=token_metadata(fleet_token)
    )
    return call


def add_pull_handler(server: grpc.aio.Server, handler: PullHandler) -> None:
    """Serve ``PULL``: the handler's bytes go out as they are."""
    rpc: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        handler, request_deserializer=pb.PullRequest.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Pull": rpc}),))


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the fleet token."""

    def __init__(self, fleet_token: str) -> None:
        self._fleet_token = fleet_token

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
        if (TOKEN_KEY, self._fleet_token) in [(item[0], item[1]) for item in metadata]:
            return await continuation(handler_call_details)
        rpc = await continuation(handler_call_details)
        if rpc is None or not (rpc.request_streaming or rpc.response_streaming):
            return self._refuse_unary
        return self._refuse_stream if rpc.request_streaming else self._refuse_pull
