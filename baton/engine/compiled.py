"""Small C++ libraries, compiled once per machine into the cache folder and loaded with ctypes.

The file name contains a digest of the sources, the compiler and its flags. Callers have a Python
fallback for machines without a compiler.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.control_groups import usable_cpus
from baton.folders import cache_root

Functions = Mapping[str, tuple[object, tuple[object, ...]]]
"""Result and argument types (ctypes) of each exported function."""

_COMPILE_TIMEOUT_S = 900.0  # per source file; long, because busy machines need kernels too


def cache_folder() -> Path:
    """Return the folder of compiled libraries."""
    return cache_root() / "native"


def compiler() -> str | None:
    """Return the path of the C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def cpu_flags() -> set[str]:
    """Return the CPU features from ``/proc/cpuinfo``; ``-march=native`` depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # x86, ARM
    return set(flags.partition(":")[2].split())


def declared(library: ctypes.CDLL, functions: Functions) -> ctypes.CDLL:
    """Set the argument and result types of a library's functions and return the library."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def loaded(
    name: str, folder: Path, flags: Sequence[str], functions: Functions, made_for: str = ""
) -> ctypes.CDLL | None:
    """Return a library, compiled first if need be; None without it, or if ``BATON_NATIVE=0``."""
    if os.environ.get("BATON_NATIVE") == "0":
        return None
    try:
        path = compiled(name, folder, flags, made_for)
        return None if path is None else declared(ctypes.CDLL(str(path)), functions)
    except OSError:
        return None


def compiled(name: str, folder: Path, flags: Sequence[str], made_for: str = "") -> Path | None:
    """Return the path of a library, compiled on first use; None without a compiler.

    Its sources are all ``.h`` and ``.cpp`` files of the folder. ``made_for`` names anything else
    that the result depends on, such as the CPU for ``-march=native``.
    """
    if (command := compiler()) is None:
        return None
    version = subprocess.run([command, "--version"], capture_output=True, check=False).stdout
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".h", ".cpp"))
    texts = [path.read_bytes() for path in sources]
    parts = (*texts, version, " ".join(flags).encode(), made_for.encode())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{name}-{platform.machine()}-{digest}.so"
    units = [str(path) for path in sources if path.suffix == ".cpp"]
    if target.exists():  # a complete file, because it is renamed after linking: no lock needed
        return target
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes start at once
        if not target.exists() and not _compile([command, *flags], units, target):
            return None
    return target


def _compile(command: Sequence[str], units: Sequence[str], target: Path) -> bool:
    """Compile all source files in parallel, then link them."""

    def run(*arguments: str) -> None:
        subprocess.run(
            [*command, *arguments], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
        )

    with TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{number}.o") for number in range(len(units))]
        partial = Path(folder) / target.name
        try:
            with ThreadPoolExecutor(usable_cpus()) as pool:
                for _ in pool.map(lambda unit, out: run("-c", unit, "-o", out), units, objects):
                    pass
            run(*objects, "-o", str(partial))
            partial.rename(target)
        except (OSError, subprocess.SubprocessError):
            return False
    return True
