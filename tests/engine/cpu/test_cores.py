"""Cores that workers of a host lend each other: real processes, one table in shared memory."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.cpu.cores import PLACES, SharedCores, cores_file
from baton.engine.cpu.native.library import load
from baton.engine.llm import DEFAULT_MODEL
from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels")

WORKER = Path(__file__).with_name("lending_worker.py")


class Worker:
    """A process of ``lending_worker.py``."""

    def __init__(self, table: Path, own: int, cores: int) -> None:
        command = [sys.executable, str(WORKER), str(table), str(own), str(cores)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> str:
        """What it answers."""
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        """Say something without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Its next answer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """As ``kill -9``."""
        self.process.kill()
        self.process.wait(10)


Start = Callable[[int, int], Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(own: int, cores: int) -> Worker:
            worker = Worker(tmp_path / "table", own, cores)
            stack.callback(worker.process.stdout.close)  # type: ignore[union-attr]
            stack.callback(worker.process.stdin.close)  # type: ignore[union-attr]
            stack.callback(worker.kill)
            worker.say("see")  # it has its place
            return worker

        yield begin


def test_cores_go_to_whoever_computes_and_back(start: Start) -> None:
    first, second = start(1, 2), start(1, 2)
    assert (first.say("see"), second.say("see")) == ("1", "1")  # both load: nothing is lent
    first.say("lend")
    second.say("lend")
    assert first.say("claim") == "2"
    assert second.say("claim") == "1"
    assert first.say("see") == "1"  # at its next job, in the midst of a step
    first.say("lend")
    assert second.say("see") == "2"


def test_the_sum_never_exceeds_the_cores(start: Start) -> None:
    workers = [start(2, 6) for _ in range(3)]
    for worker in workers:
        worker.say("lend")
    for computing in range(1, 4):
        workers[computing - 1].say("claim")
        seen = [int(worker.say("see")) for worker in workers[:computing]]
        assert sum(seen) == 6
        assert max(seen) - min(seen) <= 1


def test_the_cores_of_a_worker_that_was_killed_are_lent(start: Start) -> None:
    lender, borrower = start(1, 2), start(1, 2)
    lender.say("claim")
    borrower.say("claim")
    lender.kill()  # in the midst of a step: its claim stands
    assert borrower.say("claim") == "2"
    again = start(1, 2)
    assert again.say("claim") == "1"
    assert borrower.say("claim") == "1"


def test_a_borrower_that_was_killed_leaves_nothing_behind(start: Start) -> None:
    lender, borrower = start(1, 2), start(1, 2)
    lender.say("lend")
    assert borrower.say("claim") == "2"
    borrower.tell("compute 1")
    borrower.kill()
    assert lender.say("claim") == "2"


def test_bits_are_the_same_while_cores_come_and_go(start: Start) -> None:
    alone, computing, other = start(1, 1), start(1, 3), start(2, 3)
    computing.say("claim")
    other.say("lend")
    computing.tell("compute 7")
    for _ in range(10):
        other.say("claim")
        other.say("lend")
    assert computing.hear() == alone.say("compute 7")


def test_a_worker_without_a_place_uses_its_own(tmp_path: Path, start: Start) -> None:
    table = tmp_path / "table"
    held = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import fcntl, sys; f = open(sys.argv[1], 'wb'); f.truncate(128);"
            f"fcntl.lockf(f, fcntl.LOCK_EX, {PLACES}, 0); print(flush=True); sys.stdin.read()",
            str(table),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with held:
        assert held.stdout is not None
        held.stdout.readline()
        table.chmod(0o600)
        assert start(1, 2).say("claim") == "1"
        held.kill()


def test_a_table_that_others_can_write_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_bytes(bytes(2 * PLACES))
    table.chmod(0o666)
    with pytest.raises(PermissionError, match="must be a file of this user"):
        SharedCores(1, 2, 2, table)


def test_auto_is_a_part_of_the_cores() -> None:
    auto = EngineSettings(model="m", threads=0, workers_on_host=2)
    assert [auto.on(cores).threads for cores in (1, 2, 8, 9)] == [1, 1, 4, 4]
    assert auto.on(8).lends_cores
    fixed = EngineSettings(model="m", threads=3, workers_on_host=2)
    assert fixed.on(8) == fixed


@pytest.mark.slow
async def test_an_engine_with_auto_threads_lends_after_its_start_and_has_the_same_numerics() -> (
    None
):
    fixed = EngineSettings(model=DEFAULT_MODEL, threads=1, kv_blocks=64)
    auto = msgspec.structs.replace(fixed, threads=0, workers_on_host=64)
    one = await EngineClient.start(fixed)
    other = await EngineClient.start(auto)
    try:
        assert other.ready.threads == 1
        assert other.ready.numerics_id == one.ready.numerics_id
        claimed, held = other_claims(other.ready.pid)
        assert (claimed, held) == (0, True)
    finally:
        await one.stop()
        await other.stop()


def other_claims(pid: int) -> tuple[int, bool]:
    """What a process claims in this host's table, and whether it holds a place there."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    inode = str(cores_file().stat().st_ino)
    places = [
        int(line[-2]) for line in locks if line[-4] == str(pid) and line[-3].endswith(f":{inode}")
    ]
    claims = np.frombuffer(cores_file().read_bytes(), dtype=np.uint16)
    return sum(int(claims[place]) for place in places), bool(places)
