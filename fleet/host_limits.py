"""Checks of a host's memory and limit of open files."""

import resource

from baton.control_groups import free_memory_bytes, usable_cpus

_LEAST_FILES = 1024


def available_memory(least_gib: float) -> str:
    """Return the available memory as text."""
    gib = free_memory_bytes() / 2**30
    if gib < least_gib:
        raise RuntimeError(f"{gib:.1f} GiB available, at least {least_gib:g} GiB needed")
    return f"{gib:.1f} GiB available, {usable_cpus()} cores"


def open_files() -> str:
    """Return the limit of open files as text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        raise RuntimeError(f"limit {soft}, at least {_LEAST_FILES} needed: `ulimit -n {hard}`")
    return f"limit {soft}"
