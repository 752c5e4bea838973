"""The gRPC byte transport: raw frames on ``/baton.v1.KvTransfer/Pull``."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from batonpb import prefill_pb2 as pb

from wire.grpc_options import token_metadata

SERVICE = "baton.v1.KvTransfer"
PULL = f"/{SERVICE}/Pull"


PullHandler = Callable[[pb.PullRequest, Any], AsyncIterator[bytes]]


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
