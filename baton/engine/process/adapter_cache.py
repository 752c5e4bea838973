"""Which adapters an engine holds, who uses them, and who waits for one. Pure: no I/O, no torch.

    unknown ──asked for, a place is free──▶ LOADING ──▶ LOADED ──its place is needed──▶ unknown
                                            └──▶ failed: the requests that waited for it end

An adapter stays while any request that uses it lives. When every place is taken, the least recently
used adapter gives its own up: at once when nobody uses it; otherwise it takes no further requests
until those that use it have ended. So nobody waits for ever behind adapters that are always busy.
"""

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

from baton.types.params import AdapterRef

T = TypeVar("T")


class AdapterCache(Generic[T]):
    """See the module. ``T`` is what waits: usually the command that submits a request.

    Args:
        max_loaded: How many adapters are held at once.
    """

    def __init__(self, max_loaded: int) -> None:
        self.max_loaded = max_loaded
        self._loaded: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._loading: set[str] = set()
        self._users: dict[str, str] = {}  # request -> digest
        self._uses: Counter[str] = Counter()
        self._waiting: OrderedDict[str, tuple[AdapterRef, T]] = OrderedDict()
        self._leaving: str | None = None  # takes no more requests, and goes when it has none

    # ---------------------------------------------------------------- events in

    def add(self, request_id: str, ref: AdapterRef, item: T) -> None:
        """A request needs an adapter; ``advance`` gives ``item`` back when it is loaded."""
        self._waiting[request_id] = (ref, item)

    def loaded(self, digest: str) -> None:
        """Loading has succeeded."""
        self._loading.discard(digest)
        self._loaded[digest] = None

    def failed(self, digest: str) -> list[str]:
        """Loading has failed; returns the requests that waited for it."""
        self._loading.discard(digest)
        ids = [key for key, (ref, _) in self._waiting.items() if ref.digest == digest]
        for request_id in ids:
            del self._waiting[request_id]
        return ids

    def ended(self, request_id: str) -> None:
        """A request that may use an adapter is over."""
        digest = self._users.pop(request_id, None)
        if digest is not None:
            self._uses[digest] -= 1

    def drop(self, request_id: str) -> bool:
        """Forget a waiting request; False when it does not wait for an adapter."""
        return self._waiting.pop(request_id, None) is not None

    # ---------------------------------------------------------------- actions out

    def advance(self) -> tuple[list[str], list[AdapterRef], list[T]]:
        """What to do now: adapters to drop, adapters to begin loading, and items that may go on."""
        evict: list[str] = []
        load: list[AdapterRef] = []
        ready: list[T] = []
        short = False  # an earlier request waits for a place
        if not any(self._absent(ref.digest) for ref, _ in self._waiting.values()):
            self._leaving = None
        for request_id, (ref, item) in list(self._waiting.items()):
            digest = ref.digest
            if digest in self._loaded and digest != self._leaving:
                self._use(request_id, digest)
                ready.append(item)
            elif digest not in self._loading and not short:
                evict += self._make_place()
                if len(self._loaded) + len(self._loading) < self.max_loaded:
                    self._loading.add(digest)
                    load.append(ref)
                else:
                    short = True
        return evict, load, ready

    @property
    def waiting(self) -> int:
        """Requests whose adapter is not loaded yet."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Adapters that are loaded."""
        return len(self._loaded)

    # ---------------------------------------------------------------- inside

    def _absent(self, digest: str) -> bool:
        return digest not in self._loaded and digest not in self._loading

    def _use(self, request_id: str, digest: str) -> None:
        del self._waiting[request_id]
        self._users[request_id] = digest
        self._uses[digest] += 1
        self._loaded.move_to_end(digest)

    def _make_place(self) -> list[str]:
        """Free a place if one is needed; which adapters went for it (one or none)."""
        if len(self._loaded) + len(self._loading) < self.max_loaded:
            return []
        idle = [digest for digest in self._loaded if not self._uses[digest]]
        if not idle:
            self._leaving = self._leaving or next(iter(self._loaded), None)
            return []
        gone = self._leaving if self._leaving in idle else idle[0]
        self._leaving = None
        del self._loaded[gone], self._uses[gone]
        return [gone]
