"""Work that grows with a client's input, outside the event loop or in small pieces.

Large bodies are processed by few threads, which tenants use in turn. A single call of C code holds
the interpreter in a thread, too, so what one call processes is limited
(``router/frontend/api/bodies/parse.py``).
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from baton.control_groups import usable_cpus
from baton.telemetry.process_memory import give_back
from router.routing.checks.fair_limit import FairLimit

TENANT: ContextVar[str] = ContextVar("TENANT", default="")
"""Tenant of the current call."""

_LARGE_BYTES = 32 * 1024  # a larger body is processed in a thread, since it would block the loop
_ONE_BY_ONE_BYTES = 4 * 1024  # takes about 0.4 ms; larger bodies yield to other responses
_TRIM_BYTES = 256 * 1024
_TRIM_AFTER_S = 1.0
_THREADS = max(2, min(4, usable_cpus()))

_T = TypeVar("_T")


class _PerLoop(Generic[_T]):
    """Object of each event loop."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, _T] = WeakKeyDictionary()

    def get(self) -> _T:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]


class LargeWork:
    """Thread pool for work on large bodies, with the same chance for each tenant."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="large-body")
        self._limits = _PerLoop(lambda: FairLimit(_THREADS, "large requests"))
        self._running = 0
        self._trims_soon = False
        self._ended_s = 0.0  # the last large one

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Run ``work()`` on ``size`` bytes in a thread.

        Raises:
            UnavailableError: Too much work of the tenant waits.
        """
        loop = asyncio.get_running_loop()
        limit = self._limits.get()
        tenant = TENANT.get()
        await limit.acquire(tenant)
        self._running += 1
        done = loop.run_in_executor(self._threads, work)
        done.add_done_callback(lambda ended: self._ended(ended, limit, tenant, size))
        return await asyncio.shield(done)  # a caller that leaves does not free the thread

    def _ended(self, done: "asyncio.Future[_T]", limit: FairLimit, tenant: str, size: int) -> None:
        done.exception()  # retrieved even if the caller has left
        limit.release(tenant)
        self._running -= 1
        if size > _TRIM_BYTES:
            loop = done.get_loop()
            self._ended_s = loop.time()
            if not self._trims_soon:
                self._trims_soon = True
                loop.call_later(_TRIM_AFTER_S, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give freed memory back after a rest, since all other threads wait meanwhile."""
        rest_s = self._ended_s + _TRIM_AFTER_S - loop.time()
        if self._running or rest_s > 0:
            loop.call_later(max(rest_s, _TRIM_AFTER_S / 4), self._trim, loop)
            return
        self._trims_soon = False
        loop.run_in_executor(self._threads, give_back)


class OneByOne:
    """Queue of work in the event loop that takes milliseconds: one item per turn of the loop."""

    def __init__(self) -> None:
        self._locks = _PerLoop(asyncio.Lock)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run ``work()`` after earlier work and after other events of the loop."""
        async with self._locks.get():
            await asyncio.sleep(0)
            return work()


class Shared(Generic[_T]):
    """Result of work that callers of one instant share; it began after each of them called."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._begun = 0
        self._latest: tuple[int, _T] | None = None

    async def get(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Return a result, of other work if that began after this call."""
        before = self._begun
        async with self._lock:
            if self._latest is None or self._latest[0] <= before:
                self._begun += 1
                self._latest = (self._begun, await work())
            return self._latest[1]


_LARGE_WORK = LargeWork()  # one per process: threads cost memory
_ONE_BY_ONE = OneByOne()


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Run ``work()`` on a body of ``size`` bytes without delaying other responses.

    Work on large bodies runs in a thread. Work on medium ones runs one at a time in the event loop,
    which handles other events in between.

    Raises:
        UnavailableError: Too much work of the tenant waits.
    """
    if size > _LARGE_BYTES:
        return await _LARGE_WORK.run(size, work)
    if size <= _ONE_BY_ONE_BYTES:
        return work()
    return await _ONE_BY_ONE.run(work)
