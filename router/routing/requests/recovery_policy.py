"""What to do when a worker fails a request: another one, local, wait, or give up. Sans-IO.

A request carries the incarnations that died while holding it. After two it is a *query of death*
and ends: whatever kills workers must not be handed to a third.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.types.errors import BatonError, PoisonRequestError, TransferError, WorkerLostError
from router.request import GenerationRequest

MAX_DEATHS = 2
MAX_ATTEMPTS = 2
MAX_MOVES = 8  # of an answer that goes on: workers may leave one after the other


class FailureRecord(Protocol):
    """What of a request decides; ``router.routing.requests.record.RequestRecord`` is it."""

    @property
    def request(self) -> GenerationRequest:
        """What was asked."""

    @property
    def attempt(self) -> int:
        """The how-many-th placement it is at."""

    @property
    def sent(self) -> bool:
        """Whether the client has a part of the answer."""

    @property
    def can_go_on(self) -> bool:
        """Whether another worker can go on behind what has come of the answer."""

    @property
    def died_holding(self) -> set[bytes]:
        """Incarnations that died while they held it."""

    @property
    def failed_prefills(self) -> set[bytes]:
        """Incarnations whose hand-off failed."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The decision. ``refusal`` is set exactly when ``action`` is ``"refuse"``."""

    action: Literal["replace", "local", "wait", "refuse"]
    refusal: BatonError | None = None


def is_poison(record: FailureRecord) -> PoisonRequestError | None:
    """The error of a request of which workers die."""
    if len(record.died_holding) < MAX_DEATHS:
        return None
    return PoisonRequestError(
        f"{len(record.died_holding)} workers died while they held this request; it is not tried "
        "again"
    )


def after_prefill_failure(
    record: FailureRecord,
    *,
    failed: bytes,
    peer_died: bool,
    others: Sequence[bytes],
    may_wait: bool,
) -> Repair:
    """The decode worker reports that its prefill worker failed; it keeps its reservation.

    Args:
        record: The request; the failure is written into it.
        failed: Incarnation of the prefill worker.
        peer_died: It is gone, not just out of reach or unwilling.
        others: Incarnations of the live prefill workers.
        may_wait: Whether there is time left for a new prefill worker to appear.
    """
    record.failed_prefills.add(failed)
    if peer_died:
        record.died_holding.add(failed)
    poison = is_poison(record)
    if poison is not None:
        return Repair("refuse", poison)
    if any(other not in record.failed_prefills for other in others):
        return Repair("replace")
    # A crash of unknown cause may be this prompt's doing: computing it locally would put the
    # decode worker, with all its streams, at the same risk. A fresh prefill worker is cheaper.
    if record.request.mode == "auto" and not peer_died:
        return Repair("local")
    if may_wait and peer_died:
        return Repair("wait")
    return Repair(
        "refuse",
        TransferError("the prefill worker failed, and no other one is there to take its place"),
    )


def may_try_again(record: FailureRecord) -> bool:
    """Whether the request may be placed once more, going on behind its tokens or starting anew."""
    if record.can_go_on:
        return record.attempt <= MAX_MOVES
    return not record.sent and record.attempt < MAX_ATTEMPTS


def after_worker_death(
    record: FailureRecord, *, dead: bytes, reason: str, died: bool
) -> BatonError | None:
    """The worker that held the request is gone.

    Args:
        record: The request; a death is written into it.
        dead: Incarnation of the worker.
        reason: For people.
        died: It is proven to be dead. One that is silent, or was stopped, has not died of this.

    Returns:
        The error to end with, or None: place it again.
    """
    if died:
        record.died_holding.add(dead)
    poison = is_poison(record)
    if poison is not None:
        return poison
    if may_try_again(record):
        return None
    where = " in the middle of the answer" if record.sent else ""
    return WorkerLostError(f"the worker was lost{where}: {reason}")
