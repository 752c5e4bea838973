"""Workers without work, as processes beside a real Redis: they are silent, and are watched over."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from baton.registry.redis_store import Registry
from baton.registry.workers import RegistryWatcher
from baton.wire.fleet_token import FleetToken
from router.process import Process
from router.sources import LaneTables
from tests.registry.conftest import redis_server
from tests.router.conftest import process_of, until
from tests.router.placement.test_registry_and_index import place
from tests.workers.harness import TOKEN, WorkerProcess

__all__ = ["redis_server"]


class Fleet:
    """A router in this process, and two workers in theirs."""

    def __init__(self, router: Process, workers: dict[str, WorkerProcess]) -> None:
        self.router = router
        self.workers = workers
        self.table = router.lanes.first.gateway.workers
        self.deaths: list[str] = []
        on_dead = self.table._listener.on_dead

        def note(link, incarnation, reason, *, died):
            self.deaths.append(link.worker_id)
            on_dead(link, incarnation, reason, died=died)

        self.table._listener.on_dead = note

    def links(self):
        return [slot.link for slot in self.table if slot.link is not None]

    def stop(self, name: str, number: int = signal.SIGSTOP) -> None:
        os.kill(self.workers[name].process.pid, number)

    async def until_dead(self, name: str, limit_s: float) -> float:
        began_s = time.monotonic()
        await until(lambda: name in self.deaths, limit_s)
        return time.monotonic() - began_s


@pytest.fixture
async def fleet(redis_server, model):
    names = ("decode-0", "decode-1")
    async with contextlib.AsyncExitStack() as stack:
        registry = Registry(redis_server.url, "test")
        stack.push_async_callback(registry.close)
        settings = {"redis_url": redis_server.url, "probe_s": 2.0}
        started = [WorkerProcess.start(name, **settings) for name in names]
        workers = dict(zip(names, await asyncio.gather(*started), strict=True))
        for worker in workers.values():
            stack.push_async_callback(worker.stop)
        tables = LaneTables.of(registry)
        token = FleetToken(TOKEN)
        router = process_of(model, RegistryWatcher(registry), tables, fleet_token=token)
        await stack.enter_async_context(router.running())
        made = Fleet(router, workers)
        await until(lambda: len(made.links()) == 2 and all(link.resting for link in made.links()))
        yield made


@pytest.mark.slow
async def test_they_say_nothing_and_are_alive(fleet: Fleet) -> None:
    await asyncio.sleep(1.0)
    heard_ns = {link: link.heard_ns for link in fleet.links()}
    await asyncio.sleep(3.5)
    assert heard_ns == {link: link.heard_ns for link in fleet.links()}, "not a frame in 3.5 s"
    ages_s = [worker["age_s"] for worker in fleet.table.describe()["workers"]]
    assert max(ages_s) < 3.0, "Redis shows that the last report holds"
    assert not fleet.deaths


@pytest.mark.slow
async def test_one_that_hangs_is_noticed_by_redis_and_no_request_waits_for_it(fleet: Fleet) -> None:
    """It was a silence of 2 s before. Redis takes 2.5 s and a look to miss it; then it is asked."""
    fleet.stop("decode-0")
    assert await fleet.until_dead("decode-0", 10.0) > 3.0, "not before it was asked"
    assert await place(fleet.router, 2) == ["decode-1"] * 2
    fleet.stop("decode-0", signal.SIGCONT)
    await until(lambda: fleet.table.get("decode-0").state == "ready")
    assert fleet.deaths == ["decode-0"]


async def test_a_request_at_one_that_hangs_goes_elsewhere_after_two_seconds(fleet: Fleet) -> None:
    await place(fleet.router, 2)
    await until(lambda: all(link.resting for link in fleet.links()))
    fleet.stop("decode-0")
    began_s = time.monotonic()
    went = await asyncio.gather(*(place(fleet.router, 1) for _ in range(6)))
    assert set(map(tuple, went)) == {("decode-1",)}
    assert 1.5 < time.monotonic() - began_s < 6.0, "2 s of silence, and an answer"
    assert fleet.deaths == ["decode-0"]


async def test_one_that_is_killed_is_dead_at_once(fleet: Fleet) -> None:
    fleet.stop("decode-0", signal.SIGKILL)
    assert await fleet.until_dead("decode-0", 2.0) < 1.0


@pytest.mark.slow
async def test_nobody_is_dead_while_redis_is_away_nor_when_it_is_back(
    fleet: Fleet, redis_server
) -> None:
    redis_server.kill()
    await asyncio.sleep(12.0)  # they are asked twice meanwhile
    assert not fleet.deaths
    assert all(link.heard_ns > time.monotonic_ns() - 7_000_000_000 for link in fleet.links())
    redis_server.start()
    await asyncio.sleep(8.0)
    assert not fleet.deaths
    heard_ns = {link: link.heard_ns for link in fleet.links()}
    await asyncio.sleep(6.0)
    assert heard_ns == {link: link.heard_ns for link in fleet.links()}, "Redis shows them again"


@pytest.mark.slow
async def test_one_that_hangs_while_redis_is_away_is_dead_in_seven_seconds(
    fleet: Fleet, redis_server
) -> None:
    redis_server.kill()
    await asyncio.sleep(3.0)
    fleet.stop("decode-0")
    await fleet.until_dead("decode-0", 9.0)
    assert fleet.deaths == ["decode-0"]
