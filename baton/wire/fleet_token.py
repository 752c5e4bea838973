"""The fleet's token: every call to a worker carries it, and every worker asks for it."""

from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import Any

import grpc
import grpc.aio

from baton.config.secrets import read_tokens
from baton.config.watched_files import WatchedFiles

TOKEN_KEY = "x-baton-fleet-token"  # noqa: S105 - the name of the header, not a token


class FleetToken:
    """What is shown to workers, and what is accepted: two for as long as one follows the other.

    Args:
        tokens: The first is shown, all are accepted. None, or an empty one: there is no token.
    """

    def __init__(self, *tokens: str) -> None:
        self._now: Callable[[], tuple[str, ...]] = lambda: tokens

    @classmethod
    def of_file(cls, file: str) -> "FleetToken":
        """The tokens in a file, one a line, read again when it changes.

        Raises:
            SecretError: It cannot be used.
        """
        watched = WatchedFiles((file,), lambda: read_tokens(file))
        token = cls()
        token._now = lambda: watched.current
        return token

    @classmethod
    def of(cls, file: str, token: str) -> "FleetToken":
        """The tokens in a file, if one is named; otherwise the one that was told."""
        return cls.of_file(file) if file else cls(token)

    @property
    def shown(self) -> str:
        """The token that goes out; empty for none."""
        return next(iter(self._now()), "")

    @property
    def accepted(self) -> tuple[str, ...]:
        """All that are valid; empty ones are none."""
        return tuple(token for token in self._now() if token)

    @property
    def valid(self) -> tuple[str, ...]:
        """All that `accepts` takes: an empty one, too, where the fleet has no token."""
        return self._now()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to a worker carries."""
        return token_metadata(self.shown)

    def accepts(self, shown: str) -> bool:
        """Whether that is a valid one; compared in constant time, with each."""
        found = [compare_digest(shown.encode(), token.encode()) for token in self._now()]
        return any(found)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.accepted)} valid)"


def token_metadata(fleet_token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that every call to a worker carries."""
    return ((TOKEN_KEY, fleet_token),)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the fleet's token."""

    def __init__(self, token: FleetToken) -> None:
        self._token = token

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
        shown = [value for key, value in metadata if key == TOKEN_KEY and isinstance(value, str)]
        if any(map(self._token.accepts, shown)):
            return await continuation(handler_call_details)
        rpc = await continuation(handler_call_details)
        if rpc is None or not (rpc.request_streaming or rpc.response_streaming):
            return self._refuse_unary
        return self._refuse_stream if rpc.request_streaming else self._refuse_pull
