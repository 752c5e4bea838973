"""Compiles the native kernels once per machine, and loads them.

    python -m engine.native.library      compile now (``make`` does it at install)

The library lies in the cache folder under a digest of its source and of what compiles it. Where
there is no compiler, or the CPU lacks AVX-512 BF16, there is none, and torch's kernels do the same
work. ``BATON_NATIVE=0`` does without it. The bits of the two differ, so the numerics ids do, and
workers of both kinds refuse to pair in ``exact``.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("attention.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w")
_COMPILE_TIMEOUT_S = 120.0


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("BATON_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "baton") / "native"


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, compiled first if need be; ``None`` where it cannot be had."""
    if os.environ.get("BATON_NATIVE") == "0" or "avx512_bf16" not in _cpu_flags():
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    try:
        path = _compiled(compiler)
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


def _compiled(compiler: str) -> Path | None:
    """Path of the library for this source, compiler and CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), _threads_library().encode())
    cpu = " ".join(sorted(_cpu_flags())).encode()
    digest = hashlib.blake2b(b"\0".join((*parts, cpu)), digest_size=8).hexdigest()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"attention-{platform.machine()}-{digest}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers start at once
        if not target.exists() and not _compile(compiler, target):
            return None
    return target


def _threads_library() -> str:
    """The OpenMP runtime that torch brought along, so that there is one pool of threads."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(found[0]) if found else "-lgomp"


def _compile(compiler: str, target: Path) -> bool:
    partial = target.with_suffix(f".{os.getpid()}")
    unit = target.with_suffix(f".{os.getpid()}.o")
    commands = (
        [compiler, *_FLAGS, "-c", str(SOURCE), "-o", str(unit)],
        [compiler, "-shared", str(unit), "-o", str(partial), _threads_library()],
    )
    try:
        for command in commands:
            subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
        partial.rename(target)
    except (OSError, subprocess.SubprocessError):
        partial.unlink(missing_ok=True)
        return False
    finally:
        unit.unlink(missing_ok=True)
    return True


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, whole, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    library.baton_attention_supports.argtypes = [whole, whole]
    library.baton_attention_supports.restype = whole
    library.baton_attention.argtypes = [
        *(pointer, size, pointer, pointer, size, size, pointer, whole, pointer),
        *(whole, whole, whole, whole, ctypes.c_float, pointer, size, whole),
    ]
    library.baton_attention.restype = None
    return library


if __name__ == "__main__":
    sys.stdout.write(f"native kernels: {'ready' if load() else 'none (torch does the work)'}\n")
