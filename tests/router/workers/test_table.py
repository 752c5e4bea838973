"""The table of workers: what a live stream says outranks what the registry says."""

import asyncio
import contextlib
import gc

import msgspec
import pytest
from batonpb.decode_pb2 import Hello

from baton.registry.types import WorkerRecord
from baton.wire.compatibility import own_wire
from router.process_core import ProcessCore
from router.routing.workers.link import WorkerLink
from router.routing.workers.table import WorkerTable
from tests.router.conftest import record_of, until
from tests.router.emulated_worker import EmulatedWorker
from tests.router.settings import settings_of
from tests.router.static_directory import StaticDirectory

SETTINGS = {"silence_s": 0.5, "reopen_s": 0.2, "dead_shown_s": 0.5}


class Listener:
    """Passes on what the gateway would, and keeps the rest."""

    def __init__(self) -> None:
        self.table: WorkerTable
        self.deaths: list[tuple[str, bool]] = []

    def on_live(self, link, *, same_life):
        self.table.note_live(link)

    def on_frame(self, link, frame):
        pass

    def on_dead(self, link, incarnation, reason, *, died):
        self.table.note_dead(link)
        self.deaths.append((reason, died))

    def on_broken(self, link, kind):
        pass

    def on_submit_failed(self, link, submission, reason):
        pass


@contextlib.asynccontextmanager
async def running(directory, failures: list[str] | None = None, **settings):
    listener = Listener()
    hello = Hello(router_id="r", router_incarnation=b"r" * 16, wire=own_wire())
    count = failures.append if failures is not None else lambda _: None
    table = WorkerTable(directory, *settings_of(**SETTINGS | settings), hello, count)
    listener.table = table
    table.start(listener)
    try:
        yield table, listener
    finally:
        await table.close()


@pytest.fixture
async def worker():
    made = await EmulatedWorker("decode-0").start()
    yield made
    await made.stop()


def state(table: WorkerTable) -> str:
    slot = table.get("decode-0")
    return slot.state if slot is not None else ""


async def test_a_record_that_expired_does_not_hang_up_a_live_stream(worker):
    """Defect 2: a Redis that refuses writes lets all records expire, and the workers are well."""
    directory = StaticDirectory([record_of("decode-0", worker.address)])
    async with running(directory) as (table, listener):
        await until(lambda: state(table) == "ready")
        directory.remove("decode-0")
        await asyncio.sleep(0.3)
        assert len(table.usable) == 1
        assert listener.deaths == []
        await worker.stop()  # only now it is gone
        await until(lambda: state(table) == "dead")
        await until(lambda: table.get("decode-0") is None, timeout_s=4)


async def test_a_worker_off_the_list_that_does_not_answer_is_dead_at_once(worker):
    directory = StaticDirectory([record_of("decode-0", "127.0.0.1:1")])
    async with running(directory) as (table, _):
        await until(lambda: state(table) == "starting")
        directory.remove("decode-0")
        await until(lambda: state(table) == "dead")
        await until(lambda: table.get("decode-0") is None, timeout_s=4)


@pytest.mark.parametrize("turns", range(6))
async def test_a_link_that_is_closed_as_it_opens_leaves_nothing_half_begun(worker, turns):
    """A loop of the stream that never ran a line was once a warning in whatever came next."""
    hello = Hello(router_id="r", router_incarnation=b"r" * 16, wire=own_wire())
    link = WorkerLink("decode-0", worker.address, Listener(), hello, ProcessCore())
    link.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    await link.close()
    gc.collect()


async def test_a_worker_whose_next_life_takes_long_to_start_stays_in_sight():
    dead = record_of("decode-0", "127.0.0.1:1")
    directory = StaticDirectory([dead])
    async with running(directory, dead_shown_s=1.5) as (table, _):
        directory.put(msgspec.structs.replace(dead, state="dead"))
        await until(lambda: state(table) == "dead")
        next_life = msgspec.structs.replace(dead, state="starting", epoch=dead.epoch + 1)
        directory.put(msgspec.structs.replace(next_life, address=""))
        await asyncio.sleep(2.6)  # the dead are shown for 1.5 s
        (shown,) = table.describe()["workers"]
        assert (shown["id"], shown["state"], shown["reason"]) == ("decode-0", "dead", "restarting")
        directory.put(msgspec.structs.replace(next_life, address="", reason="killed"))
        await until(lambda: table.get("decode-0").reason == "killed; restarting")
        why = "cannot place: no node had 1 free CPUs"
        directory.put(msgspec.structs.replace(next_life, address="", state="dead", reason=why))
        await asyncio.sleep(1.2)  # the one before has been dead for longer
        (shown,) = table.describe()["workers"]
        assert (shown["state"], shown["reason"]) == ("dead", why)
        await asyncio.sleep(2.6)
        assert table.describe()["workers"], "its slot was not removed"
        directory.put(msgspec.structs.replace(next_life, address="", state="dead", intent="leave"))
        await until(lambda: table.get("decode-0") is None, timeout_s=4)


async def test_the_worker_of_a_slot_that_was_removed_and_returns_is_starting(worker):
    """As `baton models load` after `unload` does."""
    record = record_of("decode-0", worker.address)
    directory = StaticDirectory([record])
    async with running(directory, dead_shown_s=10) as (table, _):
        await until(lambda: state(table) == "ready")
        await worker.stop()
        await until(lambda: state(table) == "dead")
        directory.put(msgspec.structs.replace(record, state="dead", intent="leave"))
        directory.remove("decode-0")
        await asyncio.sleep(0.1)
        assert state(table) == "dead"
        begun = msgspec.structs.replace(record, state="starting", epoch=2, address="")
        directory.put(begun)
        await until(lambda: state(table) == "starting")
        await asyncio.sleep(0.5)  # the stream to the earlier incarnation breaks again
        assert state(table) == "starting"
        directory.put(msgspec.structs.replace(begun, state="dead"))
        await until(lambda: state(table) == "dead")


async def test_a_drained_worker_is_parked_and_stays_in_sight_of_every_router():
    parked = msgspec.structs.replace(
        record_of("decode-0", ""), state="dead", intent="park", reason="drained by an operator"
    )
    async with running(StaticDirectory([parked]), dead_shown_s=0.2) as (table, _):
        await until(lambda: state(table) == "parked")
        await asyncio.sleep(1.5)
        (shown,) = table.describe()["workers"]
        assert (shown["state"], shown["reason"]) == ("parked", "drained by an operator")
        assert (shown["pid"], shown["ranks"], shown["threads"]) == (0, [], 0)
        assert [slot.is_wanted for slot in table] == [False]


@pytest.mark.parametrize("intent", ["leave", "park"])
async def test_a_worker_that_is_about_to_drain_takes_no_requests(worker, intent):
    directory = StaticDirectory([record_of("decode-0", worker.address)])
    async with running(directory) as (table, _):
        await until(lambda: table.usable)
        directory.put(msgspec.structs.replace(record_of("decode-0", worker.address), intent=intent))
        await until(lambda: not table.usable)
        assert state(table) == "ready", "it has not said that it drains"
        directory.put(record_of("decode-0", worker.address))
        await until(lambda: table.usable)


async def test_only_proof_counts_as_a_death(worker):
    """Defect 8: silence and an orderly end are none; refusal and another incarnation are."""
    directory = StaticDirectory([record_of("decode-0", worker.address)])
    async with running(directory) as (table, listener):
        await until(lambda: state(table) == "ready")
        worker.script.hang = True
        await until(lambda: listener.deaths)
        worker.script.hang = False
        await until(lambda: state(table) == "ready")
        await worker.stop()
        await until(lambda: len(listener.deaths) == 2)
        again = await EmulatedWorker("decode-0").start(int(worker.address.split(":")[1]))
        await until(lambda: state(table) == "ready")
        again.state = "draining"
        await until(lambda: state(table) == "draining")
        await again.stop()
        await until(lambda: len(listener.deaths) == 3)
    assert [died for _, died in listener.deaths] == [False, True, False]


async def test_an_older_record_with_another_address_never_hangs_up_a_live_stream(worker):
    """Defect 5e: a record of an earlier life, left over in Redis, ended a healthy stream."""
    record = msgspec.structs.replace(record_of("decode-0", worker.address), epoch=3)
    directory = StaticDirectory([record])
    async with running(directory) as (table, listener):
        await until(lambda: state(table) == "ready")
        link = table.link("decode-0")
        directory.put(msgspec.structs.replace(record, epoch=2, address="127.0.0.1:1"))
        await asyncio.sleep(0.2)
        assert table.link("decode-0") is link
        assert link.live
        assert listener.deaths == []


async def test_an_older_record_counts_when_the_later_life_is_dead_for_long(worker, monkeypatch):
    """A controller that lost its memory counts lives from one again: it is not ignored for ever."""
    monkeypatch.setattr("router.routing.workers.table.TRUST_OLDER_AFTER_S", 0.2)
    record = msgspec.structs.replace(record_of("decode-0", worker.address), epoch=3)
    directory = StaticDirectory([record])
    async with running(directory) as (table, _):
        await until(lambda: state(table) == "ready")
        await worker.stop()
        await until(lambda: state(table) == "dead")
        again = await EmulatedWorker("decode-0").start()
        directory.put(record_of("decode-0", again.address))
        await until(lambda: state(table) == "ready")
        await again.stop()


class Stumbling(StaticDirectory):
    """Raises once, in the middle."""

    def __init__(self, records: list[WorkerRecord]) -> None:
        super().__init__(records)
        self.faults = 1

    async def __aiter__(self):
        async for change in super().__aiter__():
            if self.faults:
                self.faults -= 1
                self._changes.put_nowait(change)
                raise ValueError("a record that nobody can read")
            yield change


async def test_a_directory_that_raises_once_is_followed_again(worker):
    """Defect 3: the task that follows it ended unheard, and the router was blind for good."""
    failures: list[str] = []
    directory = Stumbling([record_of("decode-0", worker.address)])
    async with running(directory, failures) as (table, _):
        await until(lambda: state(table) == "ready")
        assert failures == ["directory"]


async def test_a_change_that_cannot_be_applied_costs_no_other(worker, monkeypatch):
    """Defect 3: nor does a fault of the table's own blind the router."""
    failures: list[str] = []
    directory = StaticDirectory([record_of("decode-1", "127.0.0.1:1")])
    async with running(directory, failures) as (table, _):
        upsert = table._upsert

        def broken(record: WorkerRecord) -> None:
            if record.worker_id == "decode-1":
                raise KeyError("a fault of ours")
            upsert(record)

        monkeypatch.setattr(table, "_upsert", broken)
        directory.put(record_of("decode-0", worker.address))
        await until(lambda: state(table) == "ready")
    assert failures == ["directory"]
