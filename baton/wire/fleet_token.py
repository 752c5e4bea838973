"""Fleet token: every call to a worker carries it, and every worker requires it."""

from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import Any

import grpc
import grpc.aio

from baton.config.secrets import read_tokens
from baton.config.watched_files import WatchedFiles

TOKEN_KEY = "x-baton-fleet-token"  # noqa: S105 - the name of the header, not a token


class FleetToken:
    """Token for outgoing calls, and tokens accepted in incoming ones (two during a rotation).

    Args:
        tokens: The first is sent, all are accepted. None or an empty one disables the check.
    """

    def __init__(self, *tokens: str) -> None:
        self._now: Callable[[], tuple[str, ...]] = lambda: tokens

    @classmethod
    def of_file(cls, file: str) -> "FleetToken":
        """Read the tokens from a file, one a line, and again whenever the file changes.

        Raises:
            SecretError: The file is not readable, or a token is too short.
        """
        watched = WatchedFiles((file,), lambda: read_tokens(file))
        token = cls()
        token._now = lambda: watched.current
        return token

    @classmethod
    def of(cls, file: str, token: str) -> "FleetToken":
        """Return the tokens in ``file``, or ``token`` if no file is named."""
        return cls.of_file(file) if file else cls(token)

    @property
    def shown(self) -> str:
        """Token of outgoing calls; empty for none."""
        return next(iter(self._now()), "")

    @property
    def accepted(self) -> tuple[str, ...]:
        """Accepted tokens, without empty ones."""
        return tuple(token for token in self._now() if token)

    @property
    def valid(self) -> tuple[str, ...]:
        """Accepted tokens, with the empty one if the fleet has no token."""
        return self._now()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call to a worker."""
        return ((TOKEN_KEY, self.shown),)

    def accepts(self, shown: str) -> bool:
        """Return whether ``shown`` is a valid token, comparing in constant time with each."""
        matches = [compare_digest(shown.encode(), token.encode()) for token in self._now()]
        return any(matches)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.accepted)} valid)"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that refuses calls without the fleet token."""

    def __init__(self, token: FleetToken) -> None:
        self._token = token

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the fleet token is missing or wrong"
            )

        # Whatever the method is, a handler of streams: gRPC reads no message before it runs.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            refuse
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass a call on, or answer UNAUTHENTICATED without reading the caller's messages."""
        metadata: Sequence[Any] = handler_call_details.invocation_metadata or ()
        shown = [value for key, value in metadata if key == TOKEN_KEY and isinstance(value, str)]
        if any(map(self._token.accepts, shown)):
            return await continuation(handler_call_details)
        return self._refuse
