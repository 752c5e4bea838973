"""Memory of messages that come and go by the hundred each second, some MiB each.

glibc gives such memory back to the system with each message, and the next one's pages are zeroed
and mapped anew: a quarter to a third of the CPU time of KV by gRPC.
"""

import ctypes

# of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_ABOVE_BYTES = 32 << 20  # the largest that glibc takes
_KEPT_BYTES = 128 << 20  # freed, at the end of the heap: what may be in flight, twice


def keep_message_memory() -> None:
    """Have this process use freed memory again, where the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
