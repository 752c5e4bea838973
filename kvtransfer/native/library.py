"""Compiles this folder's C++ once per machine, and loads it; ``BATON_NATIVE=0`` disables it.

    python -m kvtransfer.native.library      compile now (``make`` does it at install)

Digests use the C functions inside the xxhash package. If xxhash does not export them, or there is
no compiler, Python does everything.
"""

import ctypes
import functools
from importlib import import_module
from pathlib import Path

import xxhash

from baton.engine.compiled import Functions, cpu_flags, loaded

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w")
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_U64 = ctypes.c_uint64
_FUNCTIONS: Functions = {
    "baton_kv_hash": (None, (_POINTER,)),
    "baton_kv_gather": (None, (_POINTER, _POINTER, _POINTER, _U64, _POINTER, _POINTER)),
    "baton_kv_scatter": (_INT, (_POINTER, _POINTER, _POINTER, _U64, _POINTER, _POINTER)),
    "baton_kv_digest": (_U64, (_POINTER, _POINTER, _POINTER, _U64)),
    "baton_kv_copy": (_INT, (*(_POINTER,) * 5, _U64, _U64)),
}
"""Result and arguments of the library's functions."""

HASH_FUNCTIONS = (
    ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed"),
    ("XXH3_createState",),
    ("XXH3_64bits_reset_withSeed",),
    ("XXH3_64bits_update_dispatch", "XXH3_64bits_update"),
    ("XXH3_64bits_digest",),
    ("XXH3_freeState",),
)
"""In the order of ``Hash`` in ``kv.h``; the first exported name is used (it adapts to the CPU)."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library with its digests, or None where it is unavailable."""
    functions = hash_functions()
    cpu = " ".join(sorted(cpu_flags()))
    library = loaded("kv", Path(__file__).parent, _FLAGS, _FUNCTIONS, cpu)
    if functions is None or library is None:
        return None
    library.baton_kv_hash(functions)
    return library


def hash_functions() -> ctypes.Array[ctypes.c_void_p] | None:
    """Return the addresses of xxhash's functions, if they compute what the package computes."""
    try:
        exported = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
    except (ImportError, OSError):
        return None
    addresses = []
    for names in HASH_FUNCTIONS:
        symbol = next((name for name in names if hasattr(exported, name)), None)
        if symbol is None:
            return None
        addresses.append(ctypes.cast(exported[symbol], _POINTER).value or 0)
    whole = ctypes.CFUNCTYPE(_U64, ctypes.c_char_p, ctypes.c_size_t, _U64)(addresses[0])
    sample = bytes(range(256)) * 4
    if whole(sample, len(sample), 7) != xxhash.xxh3_64_intdigest(sample, 7):
        return None
    return (_POINTER * len(addresses))(*addresses)


if __name__ == "__main__":
    load()
