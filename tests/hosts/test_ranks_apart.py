"""Ranks on hosts of their own: no memory, no process and no `/tmp` in common, only a cable."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from fleet.worker.rank import RankSettings
from tests.hosts.rig.namespaces import Host, Rig
from tests.hosts.test_real_engine import WARM
from tests.workers.harness import TOKEN

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start_rank(host: Host) -> tuple["subprocess.Popen[bytes]", str]:
    """A program of a rank on a host, and its address."""
    settings = msgspec.json.encode(
        RankSettings(host=host.address, fleet_token=TOKEN, insecure=True)
    ).decode()
    command = f"cd {ROOT} && echo '{settings}' | exec {sys.executable} -m fleet.worker.rank"
    process = host.start(command, stdout=subprocess.PIPE)
    return process, process.stdout.readline().decode().strip()


def test_smollm2_from_two_hosts_to_three_until_a_cable_is_pulled() -> None:
    Path(WARM).mkdir(parents=True, exist_ok=True)
    with Rig(shared=[ROOT], environment={"BATON_CACHE": WARM}) as rig:
        one, two, three = rig.add("one", "two", "three")
        programs = [start_rank(host) for host in (two, two, three)]
        addresses = [address for _, address in programs]
        ends = {"prefill_ranks": addresses[:1], "decode_ranks": addresses[1:]}
        told = msgspec.json.encode({"host": one.address, **ends}).decode()
        command = f"cd {ROOT} && exec {sys.executable} -m tests.hosts.ranks_apart '{told}'"
        driver = one.start(command, stdout=subprocess.PIPE)
        assert driver.stdout.readline().decode() == "same tokens\n"
        rig.cut("three")
        began_s = time.monotonic()
        assert driver.stdout.readline().decode() == "decode ended with 1\n"
        assert time.monotonic() - began_s < 15
        assert driver.wait(30) == 0


def test_what_a_step_costs_with_a_rank_on_another_host() -> None:
    """Prints it; ``-s`` shows it. The hosts share this machine's cores."""
    Path(WARM).mkdir(parents=True, exist_ok=True)
    with Rig(shared=[ROOT], environment={"BATON_CACHE": WARM}) as rig:
        one, two = rig.add("one", "two")
        _, address = start_rank(two)
        told = msgspec.json.encode({"host": one.address, "rank": address}).decode()
        command = f"cd {ROOT} && exec {sys.executable} -m tests.hosts.step_cost '{told}'"
        print(one.output(command, timeout_s=400))
