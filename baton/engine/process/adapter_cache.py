"""Cache of an engine's LoRA adapters with users and waiting requests. Pure: no I/O, no torch.

    unknown ──requested, a slot is free──▶ LOADING ──▶ LOADED ──its slot is needed──▶ unknown
                                            └──▶ failed: the requests that wait for it end

An adapter stays while a request uses it. When every slot is taken, the least recently used adapter
is evicted: at once if it is idle, otherwise after its current requests; it takes no new ones. So no
request starves behind adapters that are always busy.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.engine.process import messages
from baton.types import events as ev
from baton.types.errors import BatonError, CancelledError_
from baton.types.params import AdapterRef

T = TypeVar("T")


class AdapterCache(Generic[T]):
    """State machine of the adapter slots; items of type ``T`` wait for adapters."""

    def __init__(self, max_loaded: int) -> None:
        self.max_loaded = max_loaded
        self._loaded: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._loading: set[str] = set()
        self._users: dict[str, str] = {}  # request -> digest
        self._uses: Counter[str] = Counter()
        self._waiting: OrderedDict[str, tuple[AdapterRef, T]] = OrderedDict()
        self._leaving: str | None = None  # takes no more requests, evicted when idle

    def add(self, request_id: str, ref: AdapterRef, item: T) -> None:
        """Add a request for an adapter; ``advance`` returns ``item`` when it is loaded."""
        self._waiting[request_id] = (ref, item)

    def loaded(self, digest: str) -> None:
        """Record a loaded adapter."""
        self._loading.discard(digest)
        self._loaded[digest] = None

    def failed(self, digest: str) -> list[str]:
        """Record a failed load and return the requests that waited for it."""
        self._loading.discard(digest)
        ids = [key for key, (ref, _) in self._waiting.items() if ref.digest == digest]
        for request_id in ids:
            del self._waiting[request_id]
        return ids

    def ended(self, request_id: str) -> None:
        """Record the end of a request that may use an adapter."""
        digest = self._users.pop(request_id, None)
        if digest is not None:
            self._uses[digest] -= 1

    def drop(self, request_id: str) -> bool:
        """Forget a waiting request; False if it does not wait."""
        return self._waiting.pop(request_id, None) is not None

    def advance(self) -> tuple[list[str], list[AdapterRef], list[T]]:
        """Return adapters to evict, adapters to load, and items whose adapter is loaded."""
        evict: list[str] = []
        load: list[AdapterRef] = []
        ready: list[T] = []
        short = False  # an earlier request waits for a slot
        if {ref.digest for ref, _ in self._waiting.values()} <= {*self._loaded, *self._loading}:
            self._leaving = None
        for request_id, (ref, item) in list(self._waiting.items()):
            digest = ref.digest
            if digest in self._loaded and digest != self._leaving:
                self._use(request_id, digest)
                ready.append(item)
            elif digest not in self._loading and not short:
                evict += self._free_slot()
                if len(self._loaded) + len(self._loading) < self.max_loaded:
                    self._loading.add(digest)
                    load.append(ref)
                else:
                    short = True
        return evict, load, ready

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an adapter."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Number of loaded adapters."""
        return len(self._loaded)

    def _use(self, request_id: str, digest: str) -> None:
        del self._waiting[request_id]
        self._users[request_id] = digest
        self._uses[digest] += 1
        self._loaded.move_to_end(digest)

    def _free_slot(self) -> list[str]:
        if len(self._loaded) + len(self._loading) < self.max_loaded:
            return []
        idle = [digest for digest in self._loaded if not self._uses[digest]]
        if not idle:
            self._leaving = self._leaving or next(iter(self._loaded), None)
            return []
        evicted = self._leaving if self._leaving in idle else idle[0]
        self._leaving = None
        del self._loaded[evicted], self._uses[evicted]
        return [evicted]


class AdapterRequests:
    """Requests that wait for the adapters of an engine; ``report`` takes what happens to both."""

    def __init__(self, max_loaded: int, report: Callable[[messages.Report], object]) -> None:
        self._cache: AdapterCache[messages.Submit] = AdapterCache(max_loaded)
        self._report = report
        self._names: dict[str, str] = {}

    def cancel(self, command: messages.Cancel) -> bool:
        """End a request that waits for its adapter; False if it does not wait."""
        if not self._cache.drop(command.request_id):
            return False
        self._end(command.request_id, CancelledError_(command.reason or "cancelled"))
        return True

    def _note_load(self, ref: AdapterRef, error: BatonError | None, load_s: float) -> None:
        if error is None:
            self._cache.loaded(ref.digest)
            self._names[ref.digest] = ref.name
        else:
            for request_id in self._cache.failed(ref.digest):
                self._end(request_id, error)
        self._changed(ref, "loaded" if error is None else "failed", load_s)

    def _changed(self, ref: AdapterRef, what: str, load_s: float = 0.0) -> None:
        held = self._cache.held
        self._report(
            ev.AdapterChanged(name=ref.name, digest=ref.digest, what=what, held=held, load_s=load_s)
        )

    def _end(self, request_id: str, error: BatonError) -> None:
        self._report(ev.Ended(request_id, error.code, error.message))
