"""A client's call from its arrival to the last byte of its response, and its observers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from baton.types.errors import BatonError
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.record import RequestRecord
from router.tenants.quota import QuotaReservation

Prepare = Callable[[], Awaitable[Sequence[GenerationRequest]]]


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """A call and what has become of it.

    Attributes:
        id: Its id in headers and reports.
        tenant: Its tenant; empty if its API key was not accepted.
        model: Name of the lane's model; empty if the call was refused before it was known.
        requests: Requests of the call; empty if it was refused before they were prepared.
        active: Those of them that were submitted.
        shadow: Model that runs a copy of the call; empty for none.
        copied: Prepares the requests of this copy.
        reservation: What is reserved of the tenant's limits.
        status: Status of the response; 499 if the client left.
        error: Error in place of a response.
        is_kept: Whether its report is that of an active request.
    """

    id: str
    endpoint: str
    arrived_ns: int
    tenant: str = ""
    key_id: str = ""
    client_id: str = ""
    model: str = ""
    requests: Sequence[GenerationRequest] = ()
    active: list[ActiveRequest] = field(default_factory=list)
    shadow: str = ""
    copied: Prepare | None = None
    reservation: QuotaReservation | None = None
    status: int = 499
    error: BatonError | None = None
    is_kept: bool = False

    @property
    def label(self) -> str:
        """Tenant in metrics and logs, which is ``all`` before requests are prepared."""
        return self.tenant if self.requests else "all"

    @property
    def placed(self) -> list[RequestRecord]:
        """Records of the requests that a worker has received."""
        return [active.record for active in self.active if active.record.attempt]

    @property
    def errors(self) -> list[BatonError]:
        """Errors of the submitted requests."""
        return [active.record.error for active in self.active if active.record.error is not None]


Observe = Callable[[Call], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallObservers:
    """Observers of calls, by the stage of a call, in this order.

    Attributes:
        begun: Before the first request is submitted; each may refuse the call.
        refused: Before an error is sent in place of a response.
        answered: After the last byte, while the tokens are still there.
        closed: After the last byte, for each request.
        ended: At the end.
    """

    begun: Sequence[Callable[[Call], Awaitable[None]]] = ()
    refused: Sequence[Observe] = ()
    answered: Sequence[Observe] = ()
    closed: Sequence[Callable[[Call, ActiveRequest], None]] = ()
    ended: Sequence[Observe] = ()

    def refuse(self, call: Call, error: BatonError, status: int) -> None:
        """Note an error in place of a response."""
        call.error = error
        call.status = status
        for observe in self.refused:
            observe(call)

    def end(self, call: Call) -> None:
        """Note the end of a call."""
        for observe in self.ended:
            observe(call)
