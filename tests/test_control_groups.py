"""Limits of control groups, from files as both versions have them."""

import os
from pathlib import Path

import psutil
import pytest

from baton import control_groups
from baton.control_groups import cpu_quota, free_memory_bytes, total_memory_bytes, usable_cpus

GIB = 1 << 30
HUGE = str((1 << 63) - 4096)  # version 1 without a limit
V2 = "30 23 0:26 {root} {mount} rw,nosuid - cgroup2 cgroup2 rw"
V1 = "3{n} 31 0:2{n} {root} {mount}/{name} rw - cgroup cgroup rw,{name}"


class Machine:
    """Files of `/proc` and of the mounted groups."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setattr(control_groups, "_GROUPS", folder / "cgroup")
        monkeypatch.setattr(control_groups, "_MOUNTS", folder / "mountinfo")

    def belongs(self, groups: str, *mounts: str, root: str = "/") -> None:
        (self.folder / "cgroup").write_text(groups)
        lines = [line.replace("{root}", root) for line in mounts]
        lines = [line.replace("{mount}", str(self.folder)) for line in lines]
        (self.folder / "mountinfo").write_text(
            "\n".join(["1 0 8:1 / / rw - ext4 /dev/a rw", *lines])
        )

    def group(self, path: str, **files: str) -> None:
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    memory = psutil.virtual_memory()._replace(available=64 * GIB, total=128 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return Machine(tmp_path, monkeypatch)


def found() -> tuple[float, float, int]:
    return free_memory_bytes() / GIB, total_memory_bytes() / GIB, usable_cpus()


def test_without_limits_the_machine_is_the_limit(machine: Machine) -> None:
    assert found() == (64, 128, 16), "no files at all"
    machine.belongs("0::/", V2)
    assert found() == (64, 128, 16)
    machine.group("a", memory__max="max", memory__high="max", cpu__max="max 100000")
    machine.belongs("0::/a\n", V2)
    assert found() == (64, 128, 16) and cpu_quota() is None


def test_the_smallest_limit_on_the_path_holds(machine: Machine) -> None:
    """systemd's and Slurm's are at a group above or below others."""
    machine.belongs("0::/user.slice/run.scope/step\n", V2)
    machine.group("user.slice", memory__max="max", cpu__max="800000 100000")
    stat = f"anon 1\ninactive_file {GIB}\n"
    scope = {"memory__max": str(8 * GIB), "memory__current": str(3 * GIB), "memory__stat": stat}
    machine.group("user.slice/run.scope", **scope, cpu__max="150000 100000")
    machine.group("user.slice/run.scope/step", memory__max=str(20 * GIB), memory__current="0")
    assert found() == (6, 8, 2), "without the page cache that is dropped first; 1.5 CPUs"
    machine.group("user.slice/run.scope/step", memory__high=str(2 * GIB), cpu__max="1000 100000")
    assert found() == (2, 2, 1)


def test_version_1_has_a_path_for_each_controller(machine: Machine) -> None:
    groups = "9:name=systemd:/x\n4:memory:/a/b\n1:cpu,cpuacct:/q\n0::/\n"
    mounts = [V1.replace("{n}", "1").replace("{name}", "memory")]
    mounts += [V1.replace("{n}", "2").replace("{name}", "cpu,cpuacct")]
    machine.belongs(groups, *mounts)
    machine.group("memory/a", memory__limit_in_bytes=str(4 * GIB))
    machine.group("memory/a", memory__usage_in_bytes=str(GIB))
    machine.group("memory/a/b", memory__limit_in_bytes=HUGE)
    machine.group("cpu,cpuacct/q", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    assert found() == (3, 4, 3)
    machine.group("cpu,cpuacct/q", cpu__cfs_quota_us="-1")
    assert found() == (3, 4, 16)


def test_a_mount_point_with_spaces_is_found(tmp_path: Path, machine: Machine) -> None:
    machine.folder = tmp_path / "a b\\c"
    machine.group("", memory__max=str(2 * GIB), memory__current="0", cpu__max="200000 0")
    escaped = str(machine.folder).replace("\\", r"\134").replace(" ", r"\040")
    machine.folder = tmp_path
    machine.belongs("0::/\n", V2.replace("{mount}", escaped))
    assert found() == (2, 2, 16), "a period of 0 is no quota"


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/"])
def test_in_a_container_the_mounted_group_is_its_own(machine: Machine, path: str) -> None:
    """Without a namespace the path starts with it; from one of others it leads outside."""
    root = "/docker/abc" if path == "/docker/abc" else "/"
    machine.belongs(f"0::{path}\n", V2, root=root)
    machine.group("", memory__max=str(2 * GIB), memory__current="0", cpu__max="200000 100000")
    assert found() == (2, 2, 2)
