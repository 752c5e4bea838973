"""Errors of requests, in one tree.

    BatonError
    ├── InvalidRequestError        400  invalid request; names the parameter and the limit
    │   ├── PromptTooLongError     400
    │   ├── GrammarError           400  the requested format cannot be compiled or enforced
    │   ├── UnauthorizedError      401
    │   ├── ForbiddenError         403  the API key is valid, but not an operator's
    │   ├── ModelNotFoundError     404
    │   ├── ResponseNotFoundError  404  this tenant has no such stored response
    │   ├── PreviousResponseError  400  the response to continue is not stored
    │   ├── ThreadsError           400  conversations of /v1/messages are not stored
    │   ├── AdapterExistsError     409  a LoRA adapter with that name is loaded
    │   ├── SlowRequestError       408  the request did not arrive in time
    │   ├── PayloadTooLargeError   413
    │   └── UnsupportedMediaError  415  unsupported content type or encoding
    ├── QueueFullError             429  with Retry-After from the drain rate
    │   ├── SloUnreachableError    429  late by prediction, with Retry-After
    │   └── RateLimitError         429  the tenant has reached a limit, with Retry-After
    │       └── InsufficientQuotaError  429  its limit of tokens per day
    ├── BudgetSpentError           429  the tenant has used its budget of the month
    ├── LimitTooSmallError         429  the request exceeds a limit of the tenant alone
    ├── CancelledError_            499  the client disconnected (never sent)
    │   └── ClientClosedError      499  the client disconnected while sending its body
    ├── InternalError              500
    │   ├── NumericsError          500  NaN or Inf in the logits
    │   └── PoisonRequestError     500  two workers died with it; never retried
    ├── UnavailableError           503  no worker, or the requested mode is not available
    │   ├── AdapterLoadError       503  a worker could not load the LoRA adapter
    │   ├── WorkerLostError        503  the decode worker died during the stream
    │   └── TransferError          503  the KV transfer failed and could not be repaired
    │       └── PullRefusedError   503  KV was requested without a capability
    └── DeadlineError              504

Each has a ``code`` (stable, for programs), an HTTP ``status``, and whether the same request is
``retryable``. On the wire an error is ``baton.v1.Error``; ``from_code`` converts it back.
"""

from typing import ClassVar, Self

MAX_MESSAGE_CHARS = 4096
"""A message may repeat megabytes that a client sent, and is kept for reports."""


class BatonError(Exception):
    """Base of the tree.

    Args:
        message: One sentence for the user: the value, the limit, the fix.
        param: Request field at fault, if any.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"  # OpenAI's `type`
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        message = message[:MAX_MESSAGE_CHARS]
        super().__init__(message)
        self.message = message
        self.param = param

    @classmethod
    def at(cls, param: str, reason: str) -> Self:
        """Create the error of one parameter, whose name begins the message."""
        return cls(f"{param}: {reason}", param=param)

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error body."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}


class InvalidRequestError(BatonError):
    """The request is invalid."""

    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    """Prompt and response exceed the context."""

    code = "context_length_exceeded"


class GrammarError(InvalidRequestError):
    """The requested format cannot be compiled, or is too expensive."""

    code = "invalid_grammar"


class UnauthorizedError(InvalidRequestError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"
    status = 401


class ForbiddenError(InvalidRequestError):
    """The API key lacks the permission."""

    code = "operator_key_needed"
    status = 403


class ForeignPageError(ForbiddenError):
    """The call may come from a web page that the router does not trust."""

    code = "foreign_page"


class NotKeptError(InvalidRequestError):
    """The policy of the tenant stores nothing."""

    code = "not_kept"
    status = 403


class ModelNotFoundError(InvalidRequestError):
    """The fleet does not serve the requested model."""

    code = "model_not_found"
    status = 404


class ResponseNotFoundError(InvalidRequestError):
    """No stored response has this id, or it belongs to another tenant."""

    code = "response_not_found"
    status = 404


class PreviousResponseError(InvalidRequestError):
    """The response that the request continues is not stored."""

    code = "previous_response_not_found"


class ThreadsError(InvalidRequestError):
    """Conversations of ``/v1/messages`` are not stored; clients must send all messages."""

    code = "thread_unsupported_request"  # Anthropic's own, which its clients know


class AdapterExistsError(InvalidRequestError):
    """An adapter with this name is loaded."""

    code = "adapter_exists"
    status = 409


class SlowRequestError(InvalidRequestError):
    """The request's header or body did not arrive in time."""

    code = "request_timeout"
    status = 408


class PayloadTooLargeError(InvalidRequestError):
    """The request body exceeds the limit."""

    code = "payload_too_large"
    status = 413


class UnsupportedMediaError(InvalidRequestError):
    """The content type or encoding of the body is not supported."""

    code = "unsupported_media_type"
    status = 415


class QueueFullError(BatonError):
    """The queue is full.

    Args:
        retry_after_s: Expected time until a place is free, from the drain rate.
    """

    code = "queue_full"
    status = 429
    kind = "rate_limit_error"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SloUnreachableError(QueueFullError):
    """The request would be late, and so are as many others as may wait."""

    code = "slo_unreachable"


class RateLimitError(QueueFullError):
    """The tenant has reached one of its limits."""

    code = "rate_limit_exceeded"  # OpenAI's own, as the next


class InsufficientQuotaError(RateLimitError):
    """The tenant has used its tokens of the day."""

    code = "insufficient_quota"
    kind = "insufficient_quota"


class BudgetSpentError(BatonError):
    """The tenant has used its budget of the month: repeating does not help for days."""

    code = "insufficient_quota"
    status = 429
    kind = "insufficient_quota"


class LimitTooSmallError(BatonError):
    """The request exceeds a limit of the tenant alone, so that it never fits."""

    code = "request_exceeds_limit"
    status = 429
    kind = "rate_limit_error"


class CancelledError_(BatonError):  # noqa: N801, N818 - asyncio has the plain name
    """The client disconnected before its response was complete."""

    code = "cancelled"
    status = 499


class ClientClosedError(CancelledError_):
    """The client disconnected before its request had arrived."""

    code = "client_closed"


class InternalError(BatonError):
    """An internal fault of the server."""


class NumericsError(InternalError):
    """The model produced NaN or Inf.

    Args:
        rows: Faulty rows of the step's plan; empty if unknown.
    """

    code = "numerics_error"

    def __init__(self, message: str, *, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class PoisonRequestError(InternalError):
    """Workers died with this request; it is not retried."""

    code = "poison_request"


class UnavailableError(BatonError):
    """No worker can serve this request now."""

    code = "unavailable"
    status = 503
    retryable = True


class AdapterLoadError(UnavailableError):
    """A worker could not load the adapter: its files are missing or have changed."""

    code = "adapter_load_failed"
    retryable = False


class WorkerLostError(UnavailableError):
    """The worker of the request died."""

    code = "worker_lost"


class TransferError(UnavailableError):
    """The KV transfer failed and could not be repaired."""

    code = "transfer_failed"


class PullRefusedError(TransferError):
    """A peer requested KV without a valid capability."""

    code = "pull_refused"


class DeadlineError(BatonError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    status = 504
    retryable = True


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(node for child in root.__subclasses__() for node in _tree(child))]


def from_code(code: str, message: str) -> BatonError:
    """Return the error with this ``code``; ``InternalError`` for codes of newer peers."""
    for kind in _tree(BatonError):
        if kind.code == code and kind is not BatonError:
            if issubclass(kind, QueueFullError):
                return kind(message, retry_after_s=1.0)
            return kind(message)
    return InternalError(message)
