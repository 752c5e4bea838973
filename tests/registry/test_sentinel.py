"""Three Sentinels, a primary and its replica, all real: the primary dies while a fleet uses it."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.kv_events import KvEventPublisher
from baton.registry.lease import FleetLease, LeaseHolder
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import WorkerRecord
from baton.registry.workers import Presence, RegistryWatcher
from fleet.local.checks.redis_check import check_external
from fleet.local.redis_server import RedisError
from tests.registry.conftest import Reader
from tests.registry.redis_servers import Watched, free_ports

LIMIT_S = 60.0  # of what takes three seconds


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.stop()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(RegistryUnavailableError):
                if await condition():
                    return
            await asyncio.sleep(0.05)


async def test_a_fleet_goes_on_with_the_replica_of_a_primary_that_was_killed(
    watched: Watched,
) -> None:
    """Under load: nothing wrong in any index, no ticket twice by one router, the lease kept."""
    assert (await check_external(watched.url)).startswith("valkey ")
    worker, router = Registry(watched.url, "fleet"), Registry(watched.url, "fleet")
    incarnation = secrets.token_bytes(16)
    record = WorkerRecord(
        worker_id="decode-0", role="decode", state="ready", epoch=1, incarnation=incarnation
    )
    presence, publisher = Presence(worker, record), KvEventPublisher(worker, incarnation)
    presence.start()
    publisher.start()
    reader, watcher = Reader(router), RegistryWatcher(router)
    me = LeaseHolder(life="a", host="here", pid=1, url="", since_s=0.0)
    lease = FleetLease(worker, me)
    assert await lease.take() is None
    held: set[bytes] = set()
    tickets: list[int] = []
    failed = 0
    killed = False

    async def change_blocks() -> None:
        while True:
            stored = [secrets.token_bytes(16) for _ in range(8)]
            removed = [held.pop() for _ in range(4)] if len(held) > 64 else []
            held.update(stored)
            publisher.publish(stored, removed)
            await asyncio.sleep(0.01)

    async def take_tickets() -> None:
        nonlocal failed
        while True:
            try:
                tickets.append(await router.take_tickets(1, above=max(tickets, default=0)))
            except RegistryUnavailableError:
                failed += 1
            await asyncio.sleep(0.01)

    load = [asyncio.create_task(change_blocks()), asyncio.create_task(take_tickets())]

    async def busy() -> bool:
        return len(tickets) > 20 and bool(reader.hashes.get(incarnation))

    await eventually(busy)
    before = len(tickets)
    watched.primary.kill()
    killed = True

    async def goes_on() -> bool:
        return killed and len(tickets) > before + 20

    await eventually(goes_on)
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    assert failed, "the primary was not used"
    assert tickets == sorted(set(tickets))

    async def same_index() -> bool:
        return reader.hashes.get(incarnation) == held

    await eventually(same_index)

    async def listed() -> bool:
        await watcher.poll()
        return watcher.connected and set(watcher.workers) == {"decode-0"}

    await eventually(listed)

    async def kept() -> bool:
        assert await lease.renew() is None
        return await lease.left_ms() > 0

    await eventually(kept)
    with watched.replica.client() as client:
        assert client.role()[0] == "master"

    answered = AdminCommands(worker)

    async def obey() -> None:
        while (order := await answered.take()) is None:
            await asyncio.sleep(0.02)
        await answered.answer(order, CommandReply(data=order.verb))

    asked = AdminCommands(router).ask("ping", timeout_s=LIMIT_S)
    (answer, _) = await asyncio.gather(asked, obey())
    assert answer is not None and answer.data == "ping"
    await presence.stop()
    await publisher.stop()
    await reader.close()
    await worker.close()
    await router.close()


async def test_what_wrong_sentinels_and_replicas_are_told(watched: Watched) -> None:
    hosts = watched.url.removesuffix("/baton")
    with pytest.raises(RedisError, match="have no live primary named 'other'"):
        await check_external(f"{hosts}/other")
    ports = free_ports(2)
    nobody = f"redis+sentinel://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/baton"
    with pytest.raises(RedisError, match="none of 'baton' of the Sentinels"):
        await check_external(nobody)
    with pytest.raises(RedisError, match="is a replica: set the primary, or its Sentinels"):
        await check_external(f"redis://127.0.0.1:{watched.replica.port}/0")
    watched.sentinels[0].kill()
    began = time.monotonic()
    assert await check_external(watched.url)
    print(f"with one Sentinel of three away: {time.monotonic() - began:.2f} s")
