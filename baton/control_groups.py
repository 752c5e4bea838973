"""Limits of memory and CPU time that Linux control groups set, of versions 1 and 2.

Each group between the process's own and the root of its hierarchy may set one; the smallest holds.
Containers, systemd's ``MemoryMax`` and ``CPUQuota``, Slurm and Kubernetes use them.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


def free_memory_bytes() -> int:
    """Return the memory that this process and its children can still take."""
    free = psutil.virtual_memory().available
    for folder in _folders("memory"):
        limit = _memory_limit(folder)
        if limit is not None:
            free = min(free, max(0, limit - _used_memory(folder)))
    return free


def total_memory_bytes() -> int:
    """Return the memory of this machine, or of its smallest group."""
    limits = filter(None, map(_memory_limit, _folders("memory")))
    return min([psutil.virtual_memory().total, *limits])


def cpu_quota() -> int | None:
    """Return the CPUs whose time the groups grant, rounded up; None without a quota."""
    shares = [share for folder in _folders("cpu") if (share := _cpu_share(folder)) is not None]
    return max(1, math.ceil(min(shares))) if shares else None


def usable_cpus() -> int:
    """Return the number of CPUs of this process, by affinity and quota."""
    cpus = len(os.sched_getaffinity(0))
    return min(cpus, cpu_quota() or cpus)


def _memory_limit(folder: Path) -> int | None:
    texts = [_read(folder / name) for name in ("memory.max", "memory.high")]
    texts.append(_read(folder / "memory.limit_in_bytes"))
    limits = [int(text) for text in texts if text.isdigit()]  # not "max"
    return min(limits, default=None)


def _used_memory(folder: Path) -> int:
    """Return a group's memory without the page cache that the kernel drops first."""
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    counts = {name: int(value) for name, value in pairs}
    cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return max(0, int(used or 0) - cached)


def _cpu_share(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us")
        period = _read(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None  # no quota: "max" or -1
    return int(quota) / int(period)


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own to the mounted root.

    In a container without a namespace of its own, paths start with the group that is mounted. Paths
    outside it are those of a namespace above: then the mounted group is the nearest.
    """
    mounts = list(_mounts(controller))
    for line in _read(_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for version, root, mount in mounts:
            if version == (1 if controllers else 2):
                own = Path(path)
                inner = own.relative_to(root) if own.is_relative_to(root) else Path()
                nested = mount / inner if ".." not in inner.parts else mount
                yield from (one for one in (nested, *nested.parents) if one.is_relative_to(mount))


def _mounts(controller: str) -> Iterator[tuple[int, str, Path]]:
    """Yield version, root and mount point of each hierarchy with a controller."""
    for line in _read(_MOUNTS).splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        _, _, _, root, mount, *_ = map(_unescaped, fields.split(" "))
        if kind == "cgroup2":
            yield 2, root, Path(mount)
        elif kind == "cgroup" and controller in options.split(" ")[-1].split(","):
            yield 1, root, Path(mount)


def _unescaped(field: str) -> str:
    """Replace octal escapes, which stand for white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
