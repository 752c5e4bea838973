"""Workers of one process: what they send in one turn of the loop goes in one round trip."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from baton.registry.connection import RoundTrips, beat
from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.workers import Presence
from fleet.local.redis_server import EmbeddedRedis
from tests.registry.conftest import eventually
from tests.registry.test_workers import worker

WORKERS = 10


@pytest.fixture
async def shared(redis_server: EmbeddedRedis) -> AsyncIterator[RoundTrips]:
    made = RoundTrips(redis_server.url, joins=True)
    yield made
    await made.close()


def reads_of(server: EmbeddedRedis) -> int:
    """Return how often the server has read from a client."""
    return int(redis.Redis.from_url(server.url).info("stats")["total_reads_processed"])


@pytest.mark.parametrize("joins", [True, False])
async def test_idle_workers_send_together(redis_server: EmbeddedRedis, joins: bool) -> None:
    """Heartbeats and marks of ten workers: 20 round trips a second, or one or two."""
    shared = RoundTrips(redis_server.url, joins=joins)
    records = [worker(f"decode-{number}") for number in range(WORKERS)]
    present = [Presence(Registry("", "test", shared), record) for record in records]
    marks = [KvEventPublisher(Registry("", "test", shared), one.incarnation) for one in records]
    for one in (*present, *marks):
        one.start()
    await eventually(lambda: all(one.connected for one in present))
    await beat(1.0)
    await asyncio.sleep(0.5)
    before = reads_of(redis_server)
    await asyncio.sleep(3)
    reads = reads_of(redis_server) - before
    assert reads < 15 if joins else reads > 50
    assert len((await Registry("", "test", shared).records())[1]) == WORKERS
    for other in (*present, *marks):
        await other.stop()
    await shared.close()


async def test_each_caller_has_its_own_answers_and_errors(shared: RoundTrips) -> None:
    first, second = (Registry("", "test", shared) for _ in range(2))
    await first.send(("SET", "text", "one"))
    wrong = first.send(("GET", "text"), ("LPUSH", "text", "x"), ("GET", "text"))
    whole = second.send(("SET", "other", "two"), ("GET", "other"), atomic=True)
    answers = await asyncio.gather(
        second.send(("GET", "text"), ("STRLEN", "text")), wrong, whole, return_exceptions=True
    )
    assert answers[0] == [b"one", 3]
    assert isinstance(answers[1], RegistryUnavailableError) and "WRONGTYPE" in str(answers[1])
    assert answers[2] == [True, b"two"]
    assert (first.errors, second.errors) == (1, 0)


async def test_a_wrong_argument_lets_no_caller_wait(shared: RoundTrips) -> None:
    registries = [Registry("", "test", shared) for _ in range(2)]
    calls = registries[0].send(("SET", "a", "\ud800")), registries[1].send(("GET", "a"))
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [UnicodeEncodeError] * 2


async def test_large_values_hold_up_no_others(
    shared: RoundTrips, redis_server: EmbeddedRedis
) -> None:
    registry = Registry("", "test", shared)
    value = bytes(100_000)
    before = reads_of(redis_server)
    await asyncio.gather(*(registry.send(("SET", str(n), value)) for n in range(8)))
    assert reads_of(redis_server) - before >= 8
    assert (await registry.send(("GET", "7"))) == [value]


async def test_a_cancelled_caller_takes_nothing_from_the_others(shared: RoundTrips) -> None:
    registry = Registry("", "test", shared)
    gone = asyncio.ensure_future(registry.send(("INCR", "count")))
    stays = asyncio.ensure_future(registry.send(("INCR", "count")))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays)[0] in (1, 2)
    assert (await asyncio.gather(gone, return_exceptions=True))[0].__class__ is (
        asyncio.CancelledError
    )
    assert (await registry.send(("GET", "count")))[0] == b"2"


async def test_all_callers_learn_that_redis_is_gone_and_that_it_is_back(
    redis_server: EmbeddedRedis, shared: RoundTrips
) -> None:
    registries = [Registry("", "test", shared) for _ in range(WORKERS)]
    await asyncio.gather(*(one.state() for one in registries))
    redis_server.kill()
    calls = (one.state() for one in registries)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {RegistryUnavailableError}
    assert not any(one.connected for one in registries)
    redis_server.start()
    await asyncio.gather(*(one.state() for one in registries))
    assert all(one.connected for one in registries)


async def test_a_registry_leaves_a_shared_connection_open(shared: RoundTrips) -> None:
    leaving, staying = (Registry("", "test", shared) for _ in range(2))
    await leaving.state()
    (number,) = await staying.send(("CLIENT", "ID"))
    await leaving.close()
    assert (await staying.send(("CLIENT", "ID")))[0] == number
