"""Load that was placed and that the worker's own reports do not show yet. Sans-IO.

A status frame is up to 250 ms old. Requests placed since then would be invisible, and a burst would
go to one worker. So each placement is booked before it is sent, and counts until a report that is
young enough to hold it has come. An engine looks for new requests between two steps, which may be
a second apart, so a report says itself how old the load in it is.
"""

from dataclasses import dataclass

# A report counts for bookings at least this much older than it: the submission needs to arrive,
# and a prefill worker gets it from the decode worker.
_SETTLE_NS = 50_000_000


@dataclass(slots=True)
class _Booking:
    tokens: int
    streams: int
    at_ns: int
    adapter: str
    reported: bool = False


class LoadBook:
    """Bookings by worker and request."""

    def __init__(self) -> None:
        self._booked: dict[str, dict[str, _Booking]] = {}

    def book(
        self,
        worker_id: str,
        request_id: str,
        *,
        tokens: int,
        streams: int,
        now_ns: int,
        adapter: str = "",
    ) -> None:
        """Count a placement: prompt tokens to compute, sequences to run, the adapter's digest."""
        worker = self._booked.setdefault(worker_id, {})
        worker[request_id] = _Booking(tokens, streams, now_ns, adapter)

    def brings(self, worker_id: str, adapter: str) -> bool:
        """Whether a request that was placed there makes the worker load this adapter."""
        booked = self._booked.get(worker_id, {})
        return any(booking.adapter == adapter for booking in booked.values())

    def computed(self, request_id: str) -> None:
        """The first token came: the prompt is no longer a load."""
        for worker in self._booked.values():
            booking = worker.get(request_id)
            if booking is not None:
                booking.tokens = 0

    def take_back(self, worker_id: str | None, request_id: str) -> None:
        """Another worker does the request's part of this one."""
        if worker_id is not None:
            self._booked.get(worker_id, {}).pop(request_id, None)

    def release(self, request_id: str) -> None:
        """The request ended."""
        for worker in self._booked.values():
            worker.pop(request_id, None)

    def reported(self, worker_id: str, as_of_ns: int) -> None:
        """A report of the worker came, of how things stood there at that time."""
        for booking in self._booked.get(worker_id, {}).values():
            if as_of_ns - booking.at_ns >= _SETTLE_NS:
                booking.reported = True

    def forget(self, worker_id: str) -> None:
        """Drop the bookings of a worker that is gone."""
        self._booked.pop(worker_id, None)

    def unreported(self, worker_id: str) -> tuple[int, int]:
        """Tokens and streams that the worker's last report does not hold yet."""
        tokens = streams = 0
        for booking in self._booked.get(worker_id, {}).values():
            if not booking.reported:
                tokens += booking.tokens
                streams += booking.streams
        return tokens, streams
