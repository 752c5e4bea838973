"""Compiles the native kernels once per machine, loads them, and chooses their order of sums.

    python -m baton.engine.cpu.native.library      compile now (``make`` does it at install)

Products of bf16 are summed in one of two orders. Any CPU with AVX2 can compute both:

- ``tile``: the order of AMX tiles; without AMX, by FMAs
- ``vdp``: the order of VDPBF16PS; without AVX512_BF16, by FMAs

Hosts of one order may pair in ``exact``, by whatever instructions. ``auto`` chooses ``vdp`` where
there is VDPBF16PS and no AMX (AMD: it is much faster there than FMAs) and where there is no AVX-512
(sums of ``tile`` do not fit into its registers), else ``tile``. A fleet of mixed CPUs sets one for
all: ``numerics: {native: tile}``.

Without a compiler or AVX2, and with ``native: off``, there is no library, and torch's kernels do
the same work. The bits differ, so the numerics ids do, and workers of different kinds refuse to
pair in ``exact``. ``BATON_NATIVE`` overrides the configuration. It takes ``auto``, ``tile``,
``vdp``, ``0``, and for tests ``amx`` (tiles, or an error), ``emulate`` (``tile`` by FMAs although
there is AMX) and ``software`` (AMX's kernels over tiles in software: slow).
"""

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

from baton.engine.compiled import Functions, compiled, compiler, cpu_flags, declared

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-w")
_CPU_FLAGS = {"avx2", "fma", "f16c"}  # AVX-512 makes it faster
_AVX512_FLAGS = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AMX_FLAGS = {"amx_tile", "amx_bf16"}
_SELF_TEST_LIMIT_S = 60.0

TILES = {"emulate": 0, "amx": 1, "software": 2}
"""Ways to compute sums of tiles: an argument of the kernels."""

PAIRS = -1
"""Value of the same argument for the sums of VDPBF16PS."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, compiled first if need be, or ``None`` where it is unavailable."""
    path = None if _wanted() == "0" else _path()
    return None if path is None else declared(ctypes.CDLL(str(path)), _FUNCTIONS)


def is_expected() -> bool:
    """Return whether this machine can have the library, without compiling it."""
    return _wanted() != "0" and cpu_flags() >= _CPU_FLAGS and compiler() is not None


@functools.cache
def sums() -> int:
    """Return how this process computes sums: ``PAIRS``, or one of ``TILES``."""
    wanted = _wanted()
    if wanted == "vdp" or (wanted == "auto" and _is_vdp_faster()):
        return PAIRS
    if wanted in ("emulate", "software"):
        return TILES[wanted]
    problem = why_no_amx()
    if wanted == "amx" and problem:
        raise RuntimeError(f"BATON_NATIVE=amx: {problem}")
    return TILES["emulate" if problem else "amx"]


def sums_name() -> str:
    """Return ``tile`` or ``vdp``: part of the numerics id."""
    return "vdp" if sums() == PAIRS else "tile"


def description() -> str:
    """Return a description of the kernels for people: ``native, by AMX (native: tile)``."""
    if load() is None:
        return "torch (no native kernels)"
    by = "VDPBF16PS" if "avx512_bf16" in cpu_flags() else "FMA"
    if sums() != PAIRS:
        ways = {"amx": "AMX", "emulate": "FMA", "software": "tiles in software"}
        by = next(ways[name] for name in ways if TILES[name] == sums())
    return f"native, by {by} (native: {sums_name()})"


def widens_bf16() -> bool:
    """Return whether this CPU's bf16 weights are kept in fp32 by oneDNN (``OneDnnWeight``)."""
    flags = cpu_flags()
    return not (flags >= _AVX512_FLAGS or "bf16" in flags)  # x86, ARM


def choose_native(native: str) -> None:
    """Set ``auto``, ``tile``, ``vdp`` or ``off`` here and in child processes, before ``load``."""
    if native != "auto":  # the default; fleets that a notebook starts after this have their own
        os.environ.setdefault("BATON_NATIVE", "0" if native == "off" else native)


def _wanted() -> str:
    wanted = os.environ.get("BATON_NATIVE") or "auto"
    if wanted not in ("auto", "tile", "vdp", "0", *TILES):
        raise RuntimeError(f"BATON_NATIVE={wanted} is invalid; use auto, tile, vdp or 0")
    return wanted


def _is_vdp_faster() -> bool:
    flags = cpu_flags()
    if not flags >= _AVX512_FLAGS:
        return True
    return "avx512_bf16" in flags and not flags >= _AMX_FLAGS


@functools.cache
def _path() -> Path | None:
    if not cpu_flags() >= _CPU_FLAGS:
        return None
    cpu = " ".join(sorted(cpu_flags()))
    try:
        return compiled("kernels", Path(__file__).parent, _FLAGS, made_for=cpu)
    except OSError:
        return None


def why_no_amx() -> str:
    """Return why tiles cannot be used, or "". They are tested once per machine.

    The test runs in a separate process: an instruction that the machine refuses would end this one.
    """
    path = _path()
    if path is None or not cpu_flags() >= _AMX_FLAGS:
        return "this CPU has no AMX"
    if not ctypes.CDLL(str(path)).baton_tiles_permitted():
        return "the kernel does not let processes use AMX"
    verdict = path.with_suffix(".amx")
    if not verdict.exists():
        command = (sys.executable, "-S", "-c", _SELF_TEST, str(path))
        try:
            done = subprocess.run(command, timeout=_SELF_TEST_LIMIT_S, check=False)
            fault = "" if done.returncode == 0 else f"AMX self-test failed: code {done.returncode}"
        except subprocess.TimeoutExpired:
            fault = f"AMX self-test took more than {_SELF_TEST_LIMIT_S:.0f} s"
        with contextlib.suppress(OSError):
            verdict.write_text(fault, encoding="utf-8")
        return fault
    return verdict.read_text(encoding="utf-8")


_SELF_TEST = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(0 if library.baton_tiles_permitted() and library.baton_tiles_agree(1) == 0 else 1)
"""


_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float
_ROWS = (_POINTER, _LONG)  # first row, and elements from one row to the next
_POOL = (_POINTER, _POINTER, _LONG, _LONG, _INT)  # K, V, bytes of tokens and heads, format
_SPANS = (_POINTER, _INT, _POINTER)  # spans, their number, block tables
_FUNCTIONS: Functions = {
    "baton_cores_join": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "baton_cores_claim": (None, (_INT,)),
    "baton_threads": (_INT, (_INT,)),
    "baton_threads_now": (_INT, (_INT,)),
    "baton_attention_supports": (_INT, (_INT, _INT)),
    "baton_attention": (
        None,
        (*_ROWS, *_POOL, *_SPANS, _INT, _INT, _INT, _INT, _FLOAT, *_ROWS, _INT, _INT, _POINTER),
    ),
    "baton_store": (None, (_POINTER, *_ROWS, *_POOL, *_SPANS, _INT, _INT, _INT)),
    "baton_packed_size": (_LONG, (_LONG, _LONG)),
    "baton_pack": (None, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    "baton_product": (None, (*_ROWS, _POINTER, *_ROWS, _LONG, _LONG, _LONG, _INT)),
    "baton_tiles_permitted": (_INT, ()),
    "baton_tiles_agree": (_INT, (_INT,)),
    "baton_tile_packed_size": (_LONG, (_LONG, _LONG)),
    "baton_tile_pack": (None, (_POINTER, _LONG, _LONG, _POINTER, _INT)),
    "baton_tile_product": (None, (*_ROWS, _POINTER, *_ROWS, _LONG, _LONG, _LONG, _INT, _INT)),
    "baton_int8_packed_size": (_LONG, (_LONG, _LONG)),
    "baton_int8_pack": (None, (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT)),
    "baton_int8_product": (
        None,
        (*_ROWS, _INT, _POINTER, _POINTER, _POINTER, *_ROWS, _LONG, _LONG, _LONG, _INT, _INT),
    ),
    "baton_int4_packed_size": (_LONG, (_LONG, _LONG)),
    "baton_int4_pack": (None, (_POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT)),
    "baton_int4_product": (None, (*_ROWS, _POINTER, *_ROWS, _LONG, _LONG, _LONG, _INT)),
    "baton_layers": (None, (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER)),
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
"""Result and arguments of the library's functions."""


if __name__ == "__main__":
    sys.stdout.write(f"CPU kernels: {description()}\n")
