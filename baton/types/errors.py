"""Every error that a request can end with, in one tree.

    BatonError
    ├── InvalidRequestError        400  the client's fault; names the parameter and the limit
    │   ├── PromptTooLongError     400
    │   ├── GrammarError           400  the shape asked for cannot be compiled or followed
    │   ├── UnauthorizedError      401
    │   ├── ForbiddenError         403  the API key is right, and not one of an operator
    │   ├── ModelNotFoundError     404
    │   ├── ResponseNotFoundError  404  no such stored response, for this tenant
    │   ├── PreviousResponseError  400  nor one to go on from
    │   ├── ThreadsError           400  conversations of /v1/messages are not kept here
    │   ├── AdapterExistsError     409  a LoRA adapter of that name is loaded
    │   ├── SlowRequestError       408  the request did not come in time
    │   ├── PayloadTooLargeError   413
    │   └── UnsupportedMediaError  415  a content-encoding that nothing here unfolds
    ├── QueueFullError             429  with an honest Retry-After
    ├── CancelledError_            499  the client went away (never sent)
    │   └── ClientClosedError      499  while it still sent its body
    ├── InternalError              500
    │   ├── NumericsError          500  NaN or Inf in the logits
    │   └── PoisonRequestError     500  two workers died while holding it; never retried
    ├── UnavailableError           503  no worker, or the mode asked for cannot be met
    │   ├── AdapterLoadError       503  a worker could not load the LoRA adapter
    │   ├── WorkerLostError        503  the decode worker died in the middle of the stream
    │   └── TransferError          503  the hand-off failed and could not be repaired
    │       └── PullRefusedError   503  KV was asked for without a router's word for it
    └── DeadlineError              504

Each has a ``code`` (stable, for programs), an HTTP ``status``, and says whether the same request
may be ``retryable``. On the wire an error is ``baton.v1.Error``; ``from_code`` turns it back.
"""

from typing import ClassVar, Self


class BatonError(Exception):
    """Base of the tree.

    Args:
        message: One sentence for the user: the value, the limit, what to change.
        param: The request field at fault, when there is one.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"  # OpenAI's `type`
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @classmethod
    def at(cls, param: str, reason: str) -> Self:
        """Create the error of one parameter, whose name begins the message."""
        return cls(f"{param}: {reason}", param=param)

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error body."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}


class InvalidRequestError(BatonError):
    """The request cannot be served as it stands."""

    code = "invalid_request"
    status = 400
    kind = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    """Prompt and answer do not fit into the context."""

    code = "context_length_exceeded"


class GrammarError(InvalidRequestError):
    """The structure asked for cannot be compiled, or costs too much."""

    code = "invalid_grammar"


class UnauthorizedError(InvalidRequestError):
    """The API key is missing or unknown."""

    code = "invalid_api_key"
    status = 401


class ForbiddenError(InvalidRequestError):
    """The API key may not do this."""

    code = "operator_key_needed"
    status = 403


class ModelNotFoundError(InvalidRequestError):
    """The fleet does not serve the model that was named."""

    code = "model_not_found"
    status = 404


class ResponseNotFoundError(InvalidRequestError):
    """There is no stored response of that name, or it is another tenant's."""

    code = "response_not_found"
    status = 404


class PreviousResponseError(InvalidRequestError):
    """The response that a new one is to go on from is not stored."""

    code = "previous_response_not_found"


class ThreadsError(InvalidRequestError):
    """A conversation of ``/v1/messages`` is to be kept; clients then send all of it each time."""

    code = "thread_unsupported_request"  # Anthropic's own, which its clients know


class AdapterExistsError(InvalidRequestError):
    """The name is taken."""

    code = "adapter_exists"
    status = 409


class SlowRequestError(InvalidRequestError):
    """The request, its header or its body, did not come in time."""

    code = "request_timeout"
    status = 408


class PayloadTooLargeError(InvalidRequestError):
    """The request body is over the limit."""

    code = "payload_too_large"
    status = 413


class UnsupportedMediaError(InvalidRequestError):
    """The body comes in an encoding, or of a type, that is not read here."""

    code = "unsupported_media_type"
    status = 415


class QueueFullError(BatonError):
    """The queue is full.

    Args:
        message: What is full, with the limit.
        retry_after_s: When a place is expected, from the real drain rate.
    """

    code = "queue_full"
    status = 429
    kind = "rate_limit_error"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CancelledError_(BatonError):  # noqa: N801, N818 - the plain name is asyncio's
    """The client disconnected."""

    code = "cancelled"
    status = 499


class ClientClosedError(CancelledError_):
    """The client left before its request had arrived."""

    code = "client_closed"


class InternalError(BatonError):
    """A fault of ours."""


class NumericsError(InternalError):
    """The model produced NaN or Inf.

    Args:
        message: Where.
        rows: The rows of the step's plan at fault; empty where that is not known.
    """

    code = "numerics_error"

    def __init__(self, message: str, *, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class PoisonRequestError(InternalError):
    """Workers die of this request; it is not tried again."""

    code = "poison_request"


class UnavailableError(BatonError):
    """Nothing can serve this request right now."""

    code = "unavailable"
    status = 503
    retryable = True


class AdapterLoadError(UnavailableError):
    """A worker could not load the adapter: its files are gone, or have changed since."""

    code = "adapter_load_failed"
    retryable = False


class WorkerLostError(UnavailableError):
    """The worker that held the request is gone."""

    code = "worker_lost"


class TransferError(UnavailableError):
    """The KV hand-off failed and could not be repaired."""

    code = "transfer_failed"


class PullRefusedError(TransferError):
    """A reader asked for KV without a capability that lets it have that."""

    code = "pull_refused"


class DeadlineError(BatonError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    status = 504
    retryable = True


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root, *(node for child in root.__subclasses__() for node in _tree(child))]


def from_code(code: str, message: str) -> BatonError:
    """The error that ``code`` names, or ``InternalError`` for a code from a newer peer."""
    for kind in _tree(BatonError):
        if kind.code == code and kind is not BatonError:
            if kind is QueueFullError:
                return QueueFullError(message, retry_after_s=1.0)
            return kind(message)
    return InternalError(message)
