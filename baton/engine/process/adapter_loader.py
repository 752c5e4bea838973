"""Loading of adapters in a thread, so that loading never delays a step."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from baton.engine.core.model_runner import AdapterStore
from baton.engine.process import messages
from baton.engine.process.adapter_cache import AdapterRequests
from baton.types import events as ev
from baton.types.errors import AdapterLoadError, BatonError
from baton.types.params import AdapterRef


class AdapterLoader(AdapterRequests):
    """Runs the actions of ``AdapterCache`` on the runner and on a loading thread.

    ``select`` wakes when a load has ended. All methods are for the step loop's thread. With
    ``max_loaded`` 0 every adapter is rejected.
    """

    def __init__(self, max_loaded: int, store: AdapterStore) -> None:
        self._store = store
        self._events: list[messages.Report] = []
        super().__init__(max_loaded, self._events.append)
        self._to_load: queue.SimpleQueue[AdapterRef] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[AdapterRef, Any, BatonError | None, float]] = (
            queue.SimpleQueue()
        )
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``advance`` has work."""
        return self._wakeup

    def add(self, command: messages.Submit) -> None:
        """Add a request for an adapter; ``advance`` returns it when that is loaded."""
        ref = command.spec.adapter
        if ref is None or not self._cache.max_loaded:
            error = AdapterLoadError("this worker serves no adapters (adapters.max_loaded is 0)")
            self._end(command.request_id, error)
        else:
            self._cache.add(command.request_id, ref, command)

    def note(self, reports: Sequence[messages.Report]) -> None:
        """Process the ends of requests."""
        for report in reports:
            if isinstance(report, ev.Ended):
                self._cache.ended(report.request_id)
                if self._cache.waiting:  # its slot may be free: wake the loop
                    os.eventfd_write(self._wakeup, 1)

    def advance(self) -> list[messages.Submit]:
        """Process finished loads and start new ones; return requests to submit."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        while not self._done.empty():
            self._take(*self._done.get())
        evicted, to_load, ready = self._cache.advance()
        for digest in evicted:
            self._store.remove(digest)
            self._changed(AdapterRef(self._names.pop(digest), digest, ""), "evicted")
        for ref in to_load:
            self._begin_load(ref)
        return ready

    def take_events(self) -> list[messages.Report]:
        """Return and clear the events since the last call."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _take(
        self, ref: AdapterRef, prepared: Any, error: BatonError | None, load_s: float
    ) -> None:
        if error is None:
            self._store.add(ref, prepared)
        self._note_load(ref, error, load_s)

    def _begin_load(self, ref: AdapterRef) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._load_forever, daemon=True)
            self._thread.start()
        self._to_load.put(ref)

    def _load_forever(self) -> None:
        while True:
            ref = self._to_load.get()
            began_s = time.monotonic()
            prepared = None
            error = None
            try:
                prepared = self._store.prepare(ref)
            except BatonError as known:
                error = known
            except Exception as fault:  # noqa: BLE001 - any fault fails this adapter only
                error = AdapterLoadError(f"adapter {ref.name}: {type(fault).__name__}: {fault}")
            self._done.put((ref, prepared, error, time.monotonic() - began_s))
            os.eventfd_write(self._wakeup, 1)
