"""Latest requests, for ``GET /fleet/requests/{id}``."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.routing.requests.active_request import ActiveRequest

PARTS_OF_A_CALL = 64
"""Limit of kept requests per call, so that one with thousands of inputs leaves room for others."""


@dataclass(slots=True)
class _Call:
    requests: int = 0
    kept: deque[str] = field(default_factory=deque)


class KeptRecords:
    """Running and ended requests, of which the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._active: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._calls: dict[str, _Call] = {}  # with requests in _active

    def keep(self, active: ActiveRequest) -> None:
        """Keep a request that was admitted."""
        if active.request.part_of:
            call = self._calls.setdefault(active.request.part_of, _Call())
            call.requests += 1
            call.kept.append(active.id)
            if len(call.kept) > PARTS_OF_A_CALL:
                del self._active[call.kept.popleft()]
        self._active[active.id] = active
        while len(self._active) > self._limit:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, active = self._active.popitem(last=False)
        name = active.request.part_of
        if name:
            call = self._calls[name]
            call.kept.popleft()  # the parts of a call are kept in order
            if not call.kept:
                del self._calls[name]

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request is still kept."""
        return request_id in self._active

    def get(self, request_id: str) -> ActiveRequest | None:
        """Return a request that is still kept."""
        return self._active.get(request_id)

    def parts(self, call_id: str) -> tuple[int, list[ActiveRequest]] | None:
        """Return the number of a call's requests, and those that are still kept."""
        call = self._calls.get(call_id)
        if call is None:
            return None
        return call.requests, [self._active[name] for name in call.kept]

    def newest_first(self) -> Iterator[ActiveRequest]:
        """Iterate over all kept requests."""
        return reversed(self._active.values())
