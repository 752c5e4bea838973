"""Decision after a worker failed a request: replace, compute locally, wait, or fail. Sans-IO.

A request records the incarnations that died while they held it. After two it is a poison request
and ends: it must not kill a third worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.types.errors import BatonError, PoisonRequestError, TransferError, WorkerLostError
from router.request import GenerationRequest

MAX_DEATHS = 2
MAX_ATTEMPTS = 2
MAX_MOVES = 8  # migrations of a response: workers may leave one after the other


class FailureRecord(Protocol):
    """Part of a record that the decision uses; see `router.routing.requests.record`."""

    @property
    def request(self) -> GenerationRequest:
        """Request of the client, as admitted."""

    @property
    def attempt(self) -> int:
        """Number of the current placement, from 1."""

    @property
    def sent(self) -> bool:
        """True if the client has a part of the response."""

    @property
    def can_go_on(self) -> bool:
        """True if another worker can resume the response."""

    @property
    def died_holding(self) -> set[bytes]:
        """Incarnations that died while they held the request."""

    @property
    def failed_prefills(self) -> set[bytes]:
        """Incarnations whose hand-off failed."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Decision. ``refusal`` is set exactly when ``action`` is ``"refuse"``."""

    action: Literal["replace", "local", "wait", "refuse"]
    refusal: BatonError | None = None


def is_poison(record: FailureRecord) -> PoisonRequestError | None:
    """Return the error of a poison request; None for other requests."""
    if len(record.died_holding) < MAX_DEATHS:
        return None
    return PoisonRequestError(
        f"{len(record.died_holding)} workers died while they held this request; it is not retried"
    )


def after_prefill_failure(
    record: FailureRecord,
    *,
    failed: bytes,
    peer_died: bool,
    others: Sequence[bytes],
    may_wait: bool,
    unavailable: bool = False,
) -> Repair:
    """Decide after a prefill worker failed, and add the failure to the record.

    A worker that is only ``unavailable`` has not failed: the request may come back to it later.

    The decode worker keeps its reservation. ``others`` are the live prefill workers. With
    ``peer_died`` the failed one is gone, not just unreachable or unwilling; ``unavailable`` means
    that it is well, but takes no prompts now.
    """
    if not unavailable:
        record.failed_prefills.add(failed)
    if peer_died:
        record.died_holding.add(failed)
    poison = is_poison(record)
    if poison is not None:
        return Repair("refuse", poison)
    if any(other not in {*record.failed_prefills, failed} for other in others):
        return Repair("replace")
    # A crash of unknown cause may be caused by this prompt: computing it locally would put the
    # decode worker, with all its streams, at the same risk. A fresh prefill worker is cheaper.
    if record.request.mode == "auto" and not peer_died:
        return Repair("local")
    if may_wait and (peer_died or unavailable):
        return Repair("wait")
    return Repair(
        "refuse",
        TransferError("the prefill worker failed, and there is no other prefill worker"),
    )


def may_try_again(record: FailureRecord) -> bool:
    """Return whether the request may be placed again, to resume its response or start anew."""
    if record.can_go_on:
        return record.attempt <= MAX_MOVES
    return not record.sent and record.attempt < MAX_ATTEMPTS


def after_worker_death(
    record: FailureRecord, *, dead: bytes, reason: str, died: bool
) -> BatonError | None:
    """Return the error to end with after the worker is gone, or None to place the request again.

    With ``died`` its death is proven (neither silence nor a regular stop), and added to the record.
    """
    if died:
        record.died_holding.add(dead)
    poison = is_poison(record)
    if poison is not None:
        return poison
    if may_try_again(record):
        return None
    where = " in the middle of the response" if record.sent else ""
    return WorkerLostError(f"the worker was lost{where}: {reason}")
