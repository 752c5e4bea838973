"""Lets requests wait whose prefix is being computed for another one, and admits them then.

It has no clock and no event loop of its own, so that the simulator runs it as well.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.placement.computing_prompts import SiblingWait, SiblingWaits
from router.routing.placement.placer import Placer, Quote

_LOOK_S = 0.02  # between two looks at the prefix index


T = TypeVar("T")


class _Waiter(NamedTuple, Generic[T]):
    sibling: T
    request: GenerationRequest
    entry: Waiting


class SiblingAdmitter(Generic[T]):
    """Requests that wait for a prefix. They hold no place of the window.

    Args:
        admit: Places a request; without a quote, placement chooses anew.
        begins: Called when a request begins to wait.
        later: Calls a function after some seconds.
    """

    def __init__(
        self,
        placer: Placer,
        admission: Admission,
        admit: Callable[[T, Waiting, Quote | None], None],
        begins: Callable[[T, SiblingWait], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._placer = placer
        self._admission = admission
        self._admit = admit
        self._begins = begins
        self._later = later
        self._waits = SiblingWaits(placer.computing, admission.max_waiting)
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
            now_ns = self._placer.clock_ns()
            wait = self._waits.ask(request, cheapest, quote.hashes, now_ns)
            if wait is not None:
                if not waits:
                    self._waiting[request.request_id] = _Waiter(sibling, request, entry)
                    self._admission.withdraw(entry)
                    self._begins(sibling, wait)
                self._look_later()
                return
        if self.leave(request.request_id):
            self._admission.resume(entry)
        self._admit(sibling, entry, quote)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looks = False
        for request_id in self._waits.due(self._placer.clock_ns()):
            if waiter := self._waiting.get(request_id):  # the end of another may have placed it
                self.admit(*waiter)
        if self._waiting:
            self._look_later()
