"""Compiles the native kernels once per machine, and loads them.

    python -m engine.cpu.native.library      compile now (``make`` does it at install)

A CPU with AVX-512 but without BF16 computes the bits of VDPBF16PS by two FMAs (``vectors.h``), so
hosts of both kinds may pair in ``exact``. Without a compiler, or without AVX-512, there is no
library, and torch's kernels do the same work; ``BATON_NATIVE=0`` does without it. The bits of the
two differ, so the numerics ids do, and workers of both kinds refuse to pair in ``exact``.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

from engine.compiled import compiled

SOURCES = ("team.h", "team.cpp", "vectors.h", "products.cpp", "rows.cpp", "attention.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w")
_CPU_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}  # avx512_bf16 makes it faster


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled first if need be; ``None`` where it cannot be had."""
    if os.environ.get("BATON_NATIVE") == "0" or not _cpu_flags() >= _CPU_FLAGS:
        return None
    cpu = " ".join(sorted(_cpu_flags()))
    try:
        path = compiled("kernels", Path(__file__).parent, SOURCES, _FLAGS, made_for=cpu)
        return None if path is None else _declared(ctypes.CDLL(str(path)))
    except OSError:
        return None


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_ROWS = (_POINTER, _LONG)  # the first of them, and the elements from one to the next
_POOL = (_POINTER, _POINTER, _LONG, _LONG)  # K, V, strides of tokens and heads
_SPANS = (_POINTER, _INT, _POINTER)  # spans, how many, block tables
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "baton_attention_supports": (_INT, (_INT, _INT)),
    "baton_attention": (
        None,
        (*_ROWS, *_POOL, *_SPANS, _INT, _INT, _INT, _INT, _FLOAT, *_ROWS, _INT),
    ),
    "baton_store": (None, (_POINTER, *_ROWS, *_POOL, *_SPANS, _INT, _INT, _INT)),
    "baton_packed_size": (_LONG, (_LONG, _LONG)),
    "baton_pack": (None, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    "baton_product": (None, (*_ROWS, _POINTER, *_ROWS, _LONG, _LONG, _LONG, _INT)),
    "baton_residual": (
        None,
        (*_ROWS, *_ROWS, _POINTER, _POINTER, _FLOAT, *_ROWS, _LONG, _LONG, _INT),
    ),
    "baton_heads": (
        None,
        (*_ROWS, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _INT, _INT, _INT, _INT),
    ),
    "baton_norm": (None, (*_ROWS, _POINTER, _FLOAT, *_ROWS, _LONG, _LONG, _INT)),
    "baton_finite": (None, (*_ROWS, _INT, _POINTER, _LONG, _LONG, _INT)),
    "baton_largest": (None, (*_ROWS, _LONG, _LONG, _INT, _POINTER, _INT)),
    "baton_dots": (None, (*_ROWS, *_ROWS, _POINTER, _INT, _POINTER, _LONG, _LONG, _INT)),
    "baton_gate": (None, (*_ROWS, *_ROWS, _LONG, _LONG, _INT, _INT)),
}
"""Result and arguments of what the library exports."""


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


if __name__ == "__main__":
    sys.stdout.write(f"native kernels: {'ready' if load() else 'none (torch does the work)'}\n")
