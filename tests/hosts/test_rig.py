"""The rig itself: hosts are apart, cables can be pulled, and nothing is left however it dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.hosts.rig.namespaces import HOME, Rig, RigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(shared=[ROOT]) as made:
        made.add("one", "two")
        yield made


def reaches(rig: Rig, source: str, target: str) -> bool:
    """Whether a TCP connection is refused by a host, which then is there, or gets no answer."""
    script = f"timeout 1 bash -c '</dev/tcp/{target}/9' 2>&1"
    return "refused" in rig.hosts[source].output(script, ok=False)


def test_hosts_have_their_own_names_addresses_and_folders(rig: Rig) -> None:
    one, two = rig.hosts["one"], rig.hosts["two"]
    assert one.output("hostname; echo $HOME; whoami").split() == ["one", HOME, "root"]
    assert one.address in one.output("ip -brief address show eth0")
    for folder in ("/tmp", "/dev/shm", "/run", "/opt", HOME):
        one.output(f"touch {folder}/mark")
        assert two.output(f"ls {folder}/mark 2>&1", ok=False).startswith("ls: cannot access")
        assert not Path(folder, "mark").exists()
    assert len(one.output("ls -d /proc/[0-9]*").split()) < 10, "its own processes alone"
    assert one.output(f"ls {ROOT}/pyproject.toml").strip() == f"{ROOT}/pyproject.toml"


def test_a_pulled_cable_is_silence_and_can_be_put_back(rig: Rig) -> None:
    assert reaches(rig, "one", "two") and reaches(rig, "two", "one")
    rig.cut("two")
    assert not reaches(rig, "one", "two")
    rig.join("two")
    deadline = time.monotonic() + 10
    while not reaches(rig, "one", "two"):
        assert time.monotonic() < deadline


def test_a_host_without_power_comes_back_with_its_address_and_nothing_else(rig: Rig) -> None:
    two = rig.hosts["two"]
    two.write(f"{HOME}/notes", "kept in memory only")
    rig.power_off("two")
    assert not two.running
    with pytest.raises(RigError, match="two is off"):
        two.output("true")
    assert not reaches(rig, "one", "two")
    rig.power_on("two")
    deadline = time.monotonic() + 10
    while not reaches(rig, "one", "two"):
        assert time.monotonic() < deadline
    assert two.output(f"ls {HOME}") == ""


def test_killing_all_of_a_host_ends_its_processes_alone(rig: Rig) -> None:
    one, two = rig.hosts["one"], rig.hosts["two"]
    theirs, others = one.start(["sleep", "60"]), two.start(["sleep", "60"])
    one.kill_everything()
    assert theirs.wait(10) != 0
    assert others.poll() is None
    assert one.output("echo still here") == "still here\n"
    two.kill_everything()
    others.wait(10)


def test_a_rig_that_is_killed_leaves_nothing() -> None:
    script = (
        "from tests.hosts.rig.namespaces import Rig\n"
        "with Rig() as rig:\n"
        "    (host,) = rig.add('lonely')\n"
        "    host.start(['sleep', '600'])\n"
        "    print('up', flush=True)\n"
        "    input()\n"
    )
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        family = []
        for _ in range(100):  # the last of them is forked after "up"
            family = psutil.Process(process.pid).children(recursive=True)
            if len(family) >= 5:
                break
            time.sleep(0.1)
        assert len(family) >= 5
        process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=10)
    assert left == []
    after = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert after == before
