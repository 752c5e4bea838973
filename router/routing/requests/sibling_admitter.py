"""Lets requests wait whose prefix is being computed for another one, and admits them then.

It has no clock and no event loop of its own, so that the simulator runs it as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from router.request import GenerationRequest
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting
from router.routing.peers.shared_prompts import SharedPrompts
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
        shared: Prompts of all routers; None if this is the only one.
    """

    def __init__(
        self,
        placer: Placer,
        admission: Admission,
        admit: Callable[[T, Waiting, Quote | None], None],
        begins: Callable[[T, SiblingWait], None],
        later: Callable[[float, Callable[[], None]], object],
        shared: SharedPrompts | None = None,
    ) -> None:
        self._placer = placer
        self._admission = admission
        self._admit = admit
        self._begins = begins
        self._later = later
        self._waits = SiblingWaits(placer.computing, admission.max_waiting)
        self._waiting: dict[str, _Waiter[T]] = {}
        self._looks = False
        self._shared = shared
        self._announced: set[str] = set()  # requests that wait until they are
        if shared is not None:
            shared.on_announced = self._settle

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def leave(self, request_id: str) -> bool:
        """Forget a request that has ended; return whether it waited here."""
        self._waits.leave(request_id)
        self._announced.discard(request_id)
        return self._waiting.pop(request_id, None) is not None

    def admit(
        self, sibling: T, request: GenerationRequest, entry: Waiting, *, settled: bool = False
    ) -> None:
        """Admit a request that the queue has given its turn, or let it wait.

        Until it has ``settled``, a long prompt is announced to other routers first.
        """
        request_id = request.request_id
        waits = request_id in self._waiting
        shared = self._shared
        if settled or not (shared and shared.may_announce(request)):
            shared = None
        quote: Quote | None = None
        if waits or shared is not None or self._placer.computing:
            try:
                quote = self._placer.quote(request, may_spread=settled or not waits)
            except Exception:  # noqa: BLE001 - placed without a quote, it fails again and is ended
                quote = None
        waiter = _Waiter(sibling, request, entry)
        if quote is not None and (waits or self._placer.computing):
            priced = quote.placement.candidates
            pullers = priced if quote.may_pull else ()
            now_ns = self._placer.clock_ns()
            wait = self._waits.ask(request, priced[0], quote.hashes, now_ns, pullers)
            if wait is not None:
                self._placer.computing.end(request_id)  # if it was announced
                self._hold(waiter)
                if not waits or settled:
                    self._begins(sibling, wait)
                self._look_later()
                return
        if quote and shared and (limit_s := shared.announce(request_id, quote)):
            self._waits.leave(request_id)
            self._hold(waiter)
            self._announced.add(request_id)
            self._later(limit_s, partial(self._settle, request_id))
            return
        if self.leave(request_id):
            self._admission.resume(entry)
        self._admit(sibling, entry, quote)

    def _hold(self, waiter: _Waiter[T]) -> None:
        if waiter.request.request_id not in self._waiting:
            self._waiting[waiter.request.request_id] = waiter
            self._admission.withdraw(waiter.entry)

    def _settle(self, request_id: str) -> None:
        if self._shared is not None and request_id in self._announced:
            self._announced.discard(request_id)
            self._shared.settle(request_id)
            self.admit(*self._waiting[request_id], settled=True)

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
