"""Fair queue of tenants' requests of one priority: start-time fair queueing. Sans-IO.

    tenant a  [ a7 a8 a9 … ]  tag 900 ─┐
    tenant b  [ b2 ]          tag 640 ─┼─▶ the smallest tag goes next, and the clock is set to it
    tenant c  [ c1 c2 ]       tag 700 ─┘   (equal tags: first come, first served)

Each served request advances its tenant's tag by its cost in tokens ÷ the tenant's weight. So
tenants that always wait are served tokens in proportion to their weights, within one request each;
within a tenant requests go by their hints (``service_tier``), then sessions take turns, so that the
many requests of one agent do not hold up others, and within a session the order is first come,
first served. Requests that name no session are together one. A tenant that returns after a pause
gets the clock as its tag: a pause earns no credit, and a newcomer waits for no more than one
request of each other tenant of its weight. Tags that the clock has passed are dropped.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from router.request import GenerationRequest


def equal_weights(tenant: str) -> float:
    """Return 1 for every tenant."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Place in the queue.

    Attributes:
        weight: Number of sequences of the request.
        cost_tokens: Prompt tokens to compute plus expected output tokens.
        session: Id of the flow that the client names, or of the session; empty: none.
        turn: Requests of the tenant with lower values go first.
    """

    priority: int
    request_id: str
    weight: int = 1
    tenant: str = "default"
    cost_tokens: float = 1.0
    session: str = ""
    turn: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, cost_tokens: float) -> "Waiting":
        """Return the place of a request with its expected cost."""
        return cls(
            priority=request.priority,
            request_id=request.request_id,
            weight=request.sampling.n,
            tenant=request.tenant,
            cost_tokens=cost_tokens,
            session=request.flow or request.session.id,
            turn=request.hints.turn,
        )


@dataclass(slots=True)
class _Line:
    """Requests of one tenant by turn and session: the session whose turn it is comes first."""

    tag: float
    # (order of arrival, place) by the identity of the place; no dict is empty
    turns: dict[int, OrderedDict[str, OrderedDict[int, tuple[int, Waiting]]]] = field(
        default_factory=dict
    )

    def __len__(self) -> int:
        return sum(map(len, self._sessions()))

    def __bool__(self) -> bool:
        return bool(self.turns)

    def _sessions(self) -> Iterator[OrderedDict[int, tuple[int, Waiting]]]:
        return chain.from_iterable(sessions.values() for sessions in self.turns.values())

    @property
    def first(self) -> tuple[int, Waiting]:
        """Next place, with its order of arrival."""
        return next(iter(next(iter(self.turns[min(self.turns)].values())).values()))

    @property
    def overtakes(self) -> bool:
        """True if an older place waits: the next one goes by a hint, or its session's turn."""
        order = self.first[0]
        return any(next(iter(places.values()))[0] < order for places in self._sessions())

    @property
    def newest(self) -> Waiting:
        """Place that came last."""
        lasts = (next(reversed(places.values())) for places in self._sessions())
        return max(lasts, key=lambda last: last[0])[1]

    def push(self, order: int, entry: Waiting) -> None:
        """Append a place to its session, and a new session behind the others."""
        sessions = self.turns.setdefault(entry.turn, OrderedDict())
        sessions.setdefault(entry.session, OrderedDict())[id(entry)] = (order, entry)

    def pop(self) -> Waiting:
        """Remove the next place; the other sessions have their turn before its session."""
        _, entry = self.first
        self.remove(entry)
        sessions = self.turns.get(entry.turn, OrderedDict())
        if entry.session in sessions:
            sessions.move_to_end(entry.session)
        return entry

    def remove(self, entry: Waiting) -> None:
        """Remove a place, if it is there."""
        sessions = self.turns.get(entry.turn, OrderedDict())
        places = sessions.get(entry.session)
        if places is not None:
            places.pop(id(entry), None)
            if not places:
                del sessions[entry.session]
            if not sessions:
                del self.turns[entry.turn]


class FairQueue:
    """Queue of the requests of one priority.

    Args:
        weight_of: Function from a tenant to its weight, above 0.

    Attributes:
        overtook: Whether the latest `pop` has taken a request before older ones of its tenant.
    """

    def __init__(self, weight_of: Callable[[str], float] = equal_weights) -> None:
        self._weight_of = weight_of
        self.overtook = False
        self.clock = 0.0
        self._lines: dict[str, _Line] = {}  # of tenants that wait
        self._tags: dict[str, float] = {}  # of tenants that were served and do not wait now
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, entry: Waiting) -> None:
        """Append a request to the tenant's line."""
        line = self._lines.get(entry.tenant)
        if line is None:
            tag = max(self.clock, self._tags.pop(entry.tenant, 0.0))
            line = self._lines[entry.tenant] = _Line(tag)
        self._arrivals += 1
        line.push(self._arrivals, entry)

    def head(self) -> Waiting:
        """Return the next request. The queue must not be empty."""
        return self._next().first[1]

    def pop(self) -> Waiting:
        """Remove and return the next request."""
        line = self._next()
        self.overtook = line.overtakes
        entry = line.pop()
        self.clock = line.tag
        line.tag += entry.cost_tokens / self._weight_of(entry.tenant)
        if not line:
            self._rest(entry.tenant)
        return entry

    def charge(self, tenant: str, tokens: float, *, ahead: float | None = None) -> None:
        """Correct the cost of a served request by ``tokens``.

        With ``ahead`` the tenant's tag ends at most that far after the clock.
        """
        more = tokens / self._weight_of(tenant)
        line = self._lines.get(tenant)
        if ahead is not None:
            tag = line.tag if line is not None else self._tags.get(tenant, self.clock)
            more = min(more, max(self.clock + ahead - tag, 0.0))
        if line is not None:
            line.tag += more
        elif tenant in self._tags:
            self._tags[tenant] += more

    def remove(self, entry: Waiting) -> None:
        """Remove a request that was not served, at no cost."""
        line = self._lines[entry.tenant]
        line.remove(entry)
        if not line:
            self._rest(entry.tenant)

    def _rest(self, tenant: str) -> None:
        self._tags[tenant] = self._lines.pop(tenant).tag
        self._tags = {name: tag for name, tag in self._tags.items() if tag > self.clock}

    def newest_of(self, tenant: str) -> Waiting | None:
        """Return the last request in the tenant's line."""
        line = self._lines.get(tenant)
        return line.newest if line is not None else None

    def _next(self) -> _Line:
        return min(self._lines.values(), key=lambda line: (line.tag, line.first[0]))
