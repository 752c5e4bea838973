"""Memory and file limits of the process.

glibc keeps freed memory in one arena per thread and returns it only from the end of an arena: after
some large bodies a router would keep hundreds of MiB. Therefore the number of arenas is limited,
few threads process large bodies, and freed memory is returned after the last large body.
"""

import ctypes
import gc
import logging
import resource

_LOG = logging.getLogger(__name__)

ROUTER_OBJECTS = 1_000_000
"""New objects after which a router collects reference cycles, which requests do not leave.

A collection of 2,048 running requests and 2,048 kept ones, 430,000 objects, holds the event loop
for more than 200 ms.
"""

WORKER_OBJECTS = 20_000
"""New objects after which a worker does so: it has few others, and hand-offs leave some cycles."""

_M_ARENA_MAX = -8  # this and the next two from malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_ARENAS = 2
_MMAP_ABOVE_BYTES = 32 << 20  # largest value that glibc accepts
_KEPT_BYTES = 128 << 20  # free memory kept at the end of the heap: twice what may be in flight
_OWN_FILES = 256  # files and sockets that are not clients


def give_back() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def limit_arenas() -> None:
    """Limit the number of memory arenas, if the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def collect_rarely(new_objects: int) -> None:
    """Collect reference cycles after this many new objects, and exclude all that exist now.

    Tokenizer, templates and modules are hundreds of thousands of permanent objects; a collection
    that visits all of them would delay every stream. Objects excluded by an earlier call are
    collected first: the next incarnation of a worker calls this in the same process.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(new_objects, 20, 20)


def allow_connections(count: int, handshakes: int = 0) -> None:
    """Raise the process's limit of open files for ``count`` clients, if permitted.

    ``handshakes`` are connections that are not clients yet.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + handshakes + _OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        _LOG.warning("limit of open files is below clients.max_connections=%d: %d", count, wanted)


def keep_message_memory() -> None:
    """Let this process reuse the memory of gRPC messages, if the C library is glibc.

    By default glibc returns it to the system with each message of some MiB, and the next one's
    pages are zeroed and mapped anew: a quarter to a third of the CPU time of KV transfer by gRPC.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
