"""What the process takes of the machine: memory goes back, sockets are allowed for.

glibc keeps freed memory in one arena per thread, and gives it back only from an arena's end: after
some large bodies a router would keep hundreds of MiB for good. So arenas are few, large bodies are
worked on by few threads, and after the last large one the rest is given back.
"""

import asyncio
import ctypes
import gc
import logging
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakKeyDictionary

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")

_M_ARENA_MAX = -8  # of malloc.h
_ARENAS = 2
_OWN_FILES = 256  # files and sockets that are not clients
_TRIM_BYTES = 256 * 1024
_TRIM_AFTER_S = 1.0
_COLLECT_AFTER = 100_000  # objects more than before: 2,048 requests that end together are fewer
_THREADS = max(2, min(4, os.cpu_count() or 2))


class LargeWork:
    """Work on large bodies, in a few threads beside the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="large-body")
        self._running = 0
        self._trims_soon = False

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """``work()`` on ``size`` bytes, when a thread is free."""
        loop = asyncio.get_running_loop()
        self._running += 1
        try:
            return await loop.run_in_executor(self._threads, work)
        finally:
            self._running -= 1
            if size > _TRIM_BYTES and not self._trims_soon:
                self._trims_soon = True
                loop.call_later(_TRIM_AFTER_S, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._running:  # its end may come at any time: wait for it
            loop.call_later(_TRIM_AFTER_S, self._trim, loop)
            return
        self._trims_soon = False
        loop.run_in_executor(self._threads, give_back)


class OneByOne:
    """Work of some milliseconds on the event loop, one piece in each of the loop's turns."""

    def __init__(self) -> None:
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )

    async def run(self, work: Callable[[], _T]) -> _T:
        """``work()``, after what came before it, and after what else the loop has to do."""
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
            return work()


def give_back() -> None:
    """Give freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_arenas() -> None:
    """Have threads share their memory, where the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def collect_rarely() -> None:
    """Look for circles among objects less often, and never among those that are here already.

    Tokenizer, templates and modules are hundreds of thousands of objects that live for ever: to
    look at all of them holds every stream up. Objects that an earlier call kept are looked at
    again: a worker's next life calls this in the same process.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files for ``count`` clients, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        _LOG.warning("clients.max_connections = %d, but only %d files may be open", count, wanted)
