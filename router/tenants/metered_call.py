"""View of a call for quotas and usage."""

from collections.abc import Sequence
from typing import Protocol

from baton.types.errors import BatonError
from router.request import GenerationRequest
from router.tenants.quota import QuotaReservation


class MeteredRequest(Protocol):
    """Tokens of a request that a worker has received."""

    prompt_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""

    @property
    def completion_tokens(self) -> int:
        """Generated tokens."""

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens of the model's reasoning."""


class MeteredCall(Protocol):
    """A call, as `router.routing.requests.call.Call` has it."""

    tenant: str
    key_id: str
    model: str
    requests: Sequence[GenerationRequest]
    reservation: QuotaReservation | None
    status: int
    error: BatonError | None

    @property
    def placed(self) -> Sequence[MeteredRequest]:
        """Requests that a worker has received."""
