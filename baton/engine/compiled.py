"""Small C++ libraries, compiled once per machine into the cache folder and loaded by ctypes.

A library lies there under a digest of its sources and of what compiles it. Without a compiler there
is none, and who asks for one has another way to do the same work.
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

Functions = Mapping[str, tuple[object, tuple[object, ...]]]
"""Result and arguments of what a library exports, in the types of ctypes."""

_COMPILE_TIMEOUT_S = 900.0  # of one unit: a busy machine would else be without kernels


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    root = os.environ.get("BATON_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "baton") / "native"


def cpu_flags() -> set[str]:
    """What this CPU can do, in the kernel's words; what ``-march=native`` makes hangs on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # x86, ARM
    return set(flags.partition(":")[2].split())


def declared(library: ctypes.CDLL, functions: Functions) -> ctypes.CDLL:
    """A library that has been told what its functions take and give."""
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def compiled(
    name: str, folder: Path, sources: Sequence[str], flags: Sequence[str], made_for: str = ""
) -> Path | None:
    """The path of a library, compiled first if need be.

    Args:
        name: Of the library.
        folder: Where the sources lie.
        sources: Files; those that end in ``.cpp`` are compiled.
        flags: For the compiler.
        made_for: What else the result depends on, such as the CPU for ``-march=native``.

    Returns:
        None without a compiler, or if it fails.

    Raises:
        OSError: The cache folder cannot be written.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    texts = [(folder / source).read_bytes() for source in sources]
    parts = (*texts, version, " ".join(flags).encode(), made_for.encode())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"{name}-{platform.machine()}-{digest}.so"
    units = [str(folder / source) for source in sources if source.endswith(".cpp")]
    if target.exists():  # renamed to that when it was whole: nobody waits for who compiles others
        return target
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes start at once
        if not target.exists() and not _compile([compiler, *flags], units, target):
            return None
    return target


def _compile(command: Sequence[str], units: Sequence[str], target: Path) -> bool:
    """Each unit by itself, as many at once as there are cores, and then linked."""

    def run(*arguments: str) -> None:
        subprocess.run(
            [*command, *arguments], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
        )

    with TemporaryDirectory(dir=target.parent) as folder:
        objects = [str(Path(folder) / f"{number}.o") for number in range(len(units))]
        partial = Path(folder) / target.name
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for _ in pool.map(lambda unit, out: run("-c", unit, "-o", out), units, objects):
                    pass
            run(*objects, "-o", str(partial))
            partial.rename(target)
        except (OSError, subprocess.SubprocessError):
            return False
    return True
