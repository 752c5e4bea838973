"""Compiles the C++ code once per machine, and loads it, unless ``BATON_NATIVE=0``."""

import ctypes
import functools
from pathlib import Path

from baton.engine import block_names
from baton.engine.compiled import Functions, loaded

# No contraction: prices must have the same bits as in Python.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-w", "-ffp-contract=off")
_POINTER = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I32 = ctypes.c_int32
_FUNCTIONS: Functions = {
    "baton_blocks_new": (_POINTER, (_U32,)),
    "baton_blocks_delete": (None, (_POINTER,)),
    "baton_blocks_widen": (None, (_POINTER, _U32)),
    "baton_blocks_count": (_U64, (_POINTER,)),
    "baton_blocks_bytes": (_U64, (_POINTER,)),
    "baton_blocks_add": (_U64, (_POINTER, _POINTER, _U64, _U32, _U64, _POINTER)),
    "baton_blocks_remove": (_U64, (_POINTER, _POINTER, _U64, _U32, _POINTER)),
    "baton_blocks_match": (
        _U32,
        (_POINTER, _U32, _POINTER, _U64, _POINTER, _U32, _POINTER, _POINTER),
    ),
    "baton_blocks_sweep": (None, (_POINTER, _POINTER, _U32, _U32)),
    "baton_blocks_list": (_U64, (_POINTER, _U32, _POINTER, _U64)),
    "baton_blocks_clear": (None, (_POINTER,)),
    "baton_price_workers": (
        None,
        (_POINTER, _U32, *(_POINTER,) * 5, _I32, _U32, _U32, *(_POINTER,) * 5, _U32),
    ),
    "baton_price_cheapest": (
        _U32,
        (
            *(_POINTER, _U32, _POINTER, _U32, _U32, _I32, _I32),
            *(*(_POINTER,) * 5, _U32, _POINTER, _POINTER),
        ),
    ),
}
"""Result and arguments of each exported function."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library; None if it is disabled or cannot be compiled."""
    block_names.load()  # compiled at the start as well
    return loaded("placement", Path(__file__).parent, _FLAGS, _FUNCTIONS)
