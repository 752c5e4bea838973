"""Memory of gRPC messages: hundreds per second, some MiB each.

By default glibc returns it to the system with each message, and the next one's pages are zeroed and
mapped anew: a quarter to a third of the CPU time of KV transfer by gRPC.
"""

import ctypes

# from malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_ABOVE_BYTES = 32 << 20  # largest value that glibc accepts
_KEPT_BYTES = 128 << 20  # free memory kept at the end of the heap: twice what may be in flight


def keep_message_memory() -> None:
    """Let this process reuse freed memory, if the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
