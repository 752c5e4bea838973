"""Lets requests wait whose prefix is being computed for another one, and admits them then.

It has no clock and no event loop of its own, so that the simulator runs it as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.placement.computing_prompts import AwaitedPrefix, SiblingWaits
from router.routing.placement.placer import Placer, Quote

_LOOK_S = 0.02  # between two looks at the prefix index


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SiblingShell(Generic[T]):
    """What a ``SiblingAdmitter`` does to the rest of its router.

    Attributes:
        admit: Places a request; without a quote, placement chooses anew.
        begins: Called when a request begins to wait.
        clock_ns: Returns the time.
        later: Calls a function after some seconds.
    """

    admit: Callable[[T, Waiting, Quote | None], None]
    begins: Callable[[T, AwaitedPrefix], None]
    clock_ns: Callable[[], int]
    later: Callable[[float, Callable[[], None]], object]


class _Waiter(NamedTuple, Generic[T]):
    sibling: T
    request: GenerationRequest
    entry: Waiting


class SiblingAdmitter(Generic[T]):
    """Requests that wait for a prefix, at most ``limit``; they hold no place of the window."""

    def __init__(
        self, placer: Placer, admission: Admission, limit: int, shell: SiblingShell[T]
    ) -> None:
        self._placer = placer
        self._admission = admission
        self._shell = shell
        self._waits = SiblingWaits(placer.computing, limit)
        self._waiting: dict[str, _Waiter[T]] = {}
        self._looks = False

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended; return whether it waited here."""
        self._waits.leave(request_id)
        return self._waiting.pop(request_id, None) is not None

    def admit(self, sibling: T, request: GenerationRequest, entry: Waiting) -> None:
        """Admit a request that the queue has given its turn, or let it wait."""
        waits = request.request_id in self._waiting
        quote: Quote | None = None
        if waits or self._placer.computing:
            try:
                quote = self._placer.quote(request, may_spread=not waits)
            except Exception:  # noqa: BLE001 - placed without a quote, it fails again and is ended
                quote = None
        if quote is not None and self._placer.computing:
            cheapest = quote.placement.candidates[0]
            now_ns = self._shell.clock_ns()
            awaited = self._waits.ask(request, cheapest, quote.hashes, now_ns)
            if awaited is not None:
                if not waits:
                    self._waiting[request.request_id] = _Waiter(sibling, request, entry)
                    self._admission.withdraw(entry)
                    self._shell.begins(sibling, awaited)
                self._look_later()
                return
        if self.leave(request.request_id):
            self._admission.resume(entry)
        self._shell.admit(sibling, entry, quote)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._shell.later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looks = False
        for request_id in self._waits.due(self._shell.clock_ns()):
            if waiter := self._waiting.get(request_id):  # the end of another may have placed it
                self.admit(*waiter)
        if self._waiting:
            self._look_later()
