"""Which tenant is next, among requests of one priority: start-time fair queueing. Sans-IO.

    tenant a  [ a7 a8 a9 … ]  tag 900 ─┐
    tenant b  [ b2 ]          tag 640 ─┼─▶ the smallest tag goes next, and the clock is set to it
    tenant c  [ c1 c2 ]       tag 700 ─┘   (equal tags: first come)

Each served request moves its tenant's tag on by what it costs, in tokens. So tenants that wait all
the time are served equal numbers of tokens, give or take one request each; within a tenant it is
first come, first served. A tenant that comes back after a pause gets the clock as its tag: a pause
earns nothing, and a newcomer waits for no more than one request of each other tenant. Tags that the
clock has passed are dropped.
"""

from collections import deque
from dataclasses import dataclass, field

from router.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A place in the queue.

    Attributes:
        weight: How many sequences the request runs.
        cost_tokens: Prompt tokens to compute and answer tokens expected.
    """

    priority: int
    request_id: str
    weight: int = 1
    tenant: str = "default"
    cost_tokens: float = 1.0

    @classmethod
    def of(cls, request: GenerationRequest, cost_tokens: float) -> "Waiting":
        """The place of ``request``, which is expected to cost so much."""
        return cls(
            priority=request.priority,
            request_id=request.request_id,
            weight=request.sampling.n,
            tenant=request.tenant,
            cost_tokens=cost_tokens,
        )


@dataclass(slots=True)
class _Line:
    tag: float
    places: deque[tuple[int, Waiting]] = field(default_factory=deque)  # (order of arrival, who)


class FairQueue:
    """Requests of one priority."""

    def __init__(self) -> None:
        self.clock = 0.0
        self._lines: dict[str, _Line] = {}  # of tenants that wait
        self._tags: dict[str, float] = {}  # of tenants that were served and do not wait now
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(len(line.places) for line in self._lines.values())

    def push(self, entry: Waiting) -> None:
        """Get into the tenant's line."""
        line = self._lines.get(entry.tenant)
        if line is None:
            tag = max(self.clock, self._tags.pop(entry.tenant, 0.0))
            line = self._lines[entry.tenant] = _Line(tag)
        self._arrivals += 1
        line.places.append((self._arrivals, entry))

    def head(self) -> Waiting:
        """The next request. The queue must not be empty."""
        return self._next().places[0][1]

    def pop(self) -> Waiting:
        """Take the next request out of the queue."""
        line = self._next()
        entry = line.places.popleft()[1]
        self.clock = line.tag
        line.tag += entry.cost_tokens
        if not line.places:
            self._rest(entry.tenant)
        return entry

    def charge(self, tenant: str, tokens: float, *, ahead: float | None = None) -> None:
        """A served request turned out to cost so much more (or less) than was reckoned.

        With ``ahead`` the tenant's tag is put no further before the clock than that.
        """
        line = self._lines.get(tenant)
        if ahead is not None:
            tag = line.tag if line is not None else self._tags.get(tenant, self.clock)
            tokens = min(tokens, max(self.clock + ahead - tag, 0.0))
        if line is not None:
            line.tag += tokens
        elif tenant in self._tags:
            self._tags[tenant] += tokens

    def remove(self, entry: Waiting) -> None:
        """Leave without having been served: nothing is owed."""
        line = self._lines[entry.tenant]
        line.places = deque(place for place in line.places if place[1] is not entry)
        if not line.places:
            self._rest(entry.tenant)

    def _rest(self, tenant: str) -> None:
        """The tenant does not wait any more. Tags that the clock has passed are dropped."""
        self._tags[tenant] = self._lines.pop(tenant).tag
        self._tags = {name: tag for name, tag in self._tags.items() if tag > self.clock}

    def newest_of(self, tenant: str) -> Waiting | None:
        """The tenant's last in line."""
        line = self._lines.get(tenant)
        return line.places[-1][1] if line is not None else None

    def _next(self) -> _Line:
        return min(self._lines.values(), key=lambda line: (line.tag, line.places[0][0]))
