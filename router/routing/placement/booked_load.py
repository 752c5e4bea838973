"""Load that was placed and that the worker's reports do not show yet. Sans-IO.

A status frame is up to 250 ms old. Requests placed since then would be invisible, and a burst would
go to one worker. So each placement is booked before it is sent, and counts until a report arrives
that is recent enough to include it. An engine reads new requests between two steps, which may be a
second apart, so a report contains the age of its load.

Ends are subtracted in the same way, while reports still show the request. Otherwise every worker
would look fuller than it is except a new one, which would attract twice its share. So are prompts
that were computed since, where reports count a prompt as a whole until its first token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# A report counts for bookings at least this much older than it: the submission must arrive first,
# at a prefill worker by way of the decode worker.
_SETTLE_NS = 50_000_000
_WHOLE_SETTLE_NS = 20_000_000  # for engines behind HTTP, which report each submission at once


class Unreported(NamedTuple):
    """Load that a worker's last report does not include.

    ``tokens`` are prompt tokens to compute, negative if more were computed than have come;
    ``context`` is the sum over them of the tokens before each; ``streams`` is negative if more have
    ended than begun; ``stream_tokens`` are those of their prompts.
    """

    tokens: int = 0
    context: int = 0
    streams: int = 0
    stream_tokens: int = 0


_NOTHING = Unreported()


@dataclass(slots=True, kw_only=True)
class Booking:
    """Load of a placement on one worker.

    Attributes:
        tokens: Prompt tokens to compute.
        context: Sum over ``tokens`` of the tokens before each.
        streams: Sequences to run.
        stream_tokens: Tokens of the prompts of these sequences.
        at_ns: Time from which a report may include the load.
        adapter: Digest of the adapter that the worker needs; empty for none.
        whole: Whether reports count the whole prompt until its first token, and not what is left of
            it, as those of engines behind HTTP do.
    """

    tokens: int
    context: int = 0
    streams: int
    stream_tokens: int = 0
    at_ns: int
    adapter: str = ""
    whole: bool = False


@dataclass(slots=True)
class _Worker:
    """Bookings by request; unreported ones are in both dicts, and in the sums."""

    live: dict[str, Booking] = field(default_factory=dict)
    unreported: dict[str, Booking] = field(default_factory=dict)
    ended: list[tuple[int, Booking]] = field(default_factory=list)  # with the end in ns
    computed: list[tuple[int, int, int]] = field(default_factory=list)  # when, tokens, context
    tokens: int = 0
    context: int = 0
    streams: int = 0
    stream_tokens: int = 0
    reported_ns: int = 0  # time that the last report stands for
    whole: bool = False  # as in the last booking

    def add(self, booking: Booking, sign: int) -> None:
        self.tokens += sign * booking.tokens
        self.context += sign * booking.context
        self.add_streams(booking, sign)

    def add_streams(self, booking: Booking, sign: int) -> None:
        self.streams += sign * booking.streams
        self.stream_tokens += sign * booking.stream_tokens

    @property
    def sum(self) -> Unreported:
        return Unreported(self.tokens, self.context, self.streams, self.stream_tokens)


class LoadBook:
    """Bookings by worker and request."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._unreported: dict[str, _Worker] = {}  # workers with unreported load
        self._workers_of: dict[str, set[str]] = {}  # by request
        self._changed: set[str] = set()

    def book(self, worker_id: str, request_id: str, booking: Booking) -> None:
        """Book a placement of a request."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker()
        worker.whole = booking.whole
        before = worker.unreported.get(request_id)
        if before is not None:  # placed anew on the same worker
            worker.add(before, -1)
        worker.live[request_id] = worker.unreported[request_id] = booking
        worker.add(booking, 1)
        self._note(worker_id, worker)
        self._workers_of.setdefault(request_id, set()).add(worker_id)

    def brings(self, worker_id: str, adapter: str) -> bool:
        """Return whether a booked request makes the worker load this adapter."""
        worker = self._workers.get(worker_id)
        return worker is not None and any(
            booking.adapter == adapter for booking in worker.live.values()
        )

    def computed(self, request_id: str, now_ns: int) -> None:
        """End the prompt's load at the first token; reports before ``now_ns`` still show it."""
        for worker_id in self._workers_of.get(request_id, ()):
            worker = self._workers[worker_id]
            booking = worker.live[request_id]
            is_reported = request_id not in worker.unreported
            if not booking.tokens or (is_reported and not booking.whole):
                continue
            worker.tokens -= booking.tokens
            worker.context -= booking.context
            if is_reported:
                worker.computed.append((now_ns, booking.tokens, booking.context))
            booking.tokens = booking.context = 0
            self._note(worker_id, worker)

    def take_back(self, worker_id: str | None, request_id: str) -> None:
        """Remove the booking at a worker that another one replaces."""
        booked_on = self._workers_of.get(request_id, set())
        if worker_id is not None and worker_id in booked_on:
            booked_on.discard(worker_id)
            self._drop(worker_id, request_id)

    def release(self, request_id: str, now_ns: int | None = None) -> None:
        """End a request; ``now_ns`` is set if it ran to its end, as reports still show it."""
        for worker_id in self._workers_of.pop(request_id, ()):
            self._drop(worker_id, request_id, now_ns)

    def _drop(self, worker_id: str, request_id: str, ended_ns: int | None = None) -> None:
        worker = self._workers[worker_id]
        booking = worker.live.pop(request_id)
        if worker.unreported.pop(request_id, None) is not None:
            worker.add(booking, -1)
        elif ended_ns is not None and booking.streams:
            worker.ended.append((ended_ns, booking))
            worker.add_streams(booking, -1)
        else:
            return
        self._note(worker_id, worker)

    def reported(self, worker_id: str, as_of_ns: int) -> None:
        """Note a report of the worker with its load as of ``as_of_ns``."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.reported_ns = as_of_ns
        if not (worker.unreported or worker.ended or worker.computed):
            return
        settle_ns = _WHOLE_SETTLE_NS if worker.whole else _SETTLE_NS
        settled = [
            request_id
            for request_id, booking in worker.unreported.items()
            if as_of_ns - booking.at_ns >= settle_ns
        ]
        for request_id in settled:
            worker.add(worker.unreported.pop(request_id), -1)
        for at_ns, booking in worker.ended:
            if at_ns <= as_of_ns:
                worker.add_streams(booking, 1)
        worker.ended = [end for end in worker.ended if end[0] > as_of_ns]
        for at_ns, tokens, context in worker.computed:
            if at_ns <= as_of_ns:
                worker.tokens += tokens
                worker.context += context
        worker.computed = [prompt for prompt in worker.computed if prompt[0] > as_of_ns]
        self._note(worker_id, worker)

    def _note(self, worker_id: str, worker: _Worker) -> None:
        self._changed.add(worker_id)
        if worker.unreported or worker.ended or worker.computed:
            self._unreported[worker_id] = worker
        else:
            self._unreported.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """Remove the bookings of a worker that is gone."""
        worker = self._workers.pop(worker_id, None)
        self._unreported.pop(worker_id, None)
        self._changed.add(worker_id)
        if worker is not None:
            for request_id in worker.live:
                self._workers_of[request_id].discard(worker_id)

    def unreported(self, worker_id: str) -> Unreported:
        """Return the load that a worker's last report does not include."""
        worker = self._unreported.get(worker_id)
        return worker.sum if worker is not None else _NOTHING

    def counts_computed(self, worker_id: str, computed_ns: int) -> bool:
        """Return whether a prompt computed at ``computed_ns`` may still count as queued."""
        worker = self._workers.get(worker_id)
        return worker is None or not (worker.whole or worker.reported_ns >= computed_ns)

    def changed(self) -> set[str]:
        """Return the workers whose unreported load has changed since the last call."""
        changed = self._changed
        self._changed = set()
        return changed

    def booked(self) -> Iterator[tuple[str, Unreported]]:
        """Return the workers with unreported load, and that load."""
        return ((worker_id, worker.sum) for worker_id, worker in self._unreported.items())
