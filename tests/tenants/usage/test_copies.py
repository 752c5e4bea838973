"""Usage survives a Redis that restarts empty, and routers that have ended."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.usage.copies import UsageCopies
from baton.tenants.usage.ledger import HOUR_S, Counters, Ledger, RowName
from baton.tenants.usage.shared import KEPT_DAYS, SharedUsage

NOW = int(time.time()) // HOUR_S
TEAM = RowName(NOW, "team", "key", "model")


@pytest.fixture(autouse=True)
def one_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the hour, which may end between the import of this file and a test."""
    clock = SimpleNamespace(time=lambda: NOW * HOUR_S + 60.0)
    monkeypatch.setattr("baton.tenants.usage.copies.time", clock)


@pytest.fixture
def shared(registry) -> SharedUsage:
    return SharedUsage(registry)


@pytest.fixture
def copies(shared, tmp_path) -> UsageCopies:
    return UsageCopies(shared, tmp_path / "usage", lambda _: None)


async def use(shared: SharedUsage, life: str, requests: int = 1) -> Ledger:
    ledger = Ledger(life)
    for hour in (NOW, NOW - 1):
        ledger.row(TEAM._replace(hour=hour)).requests += requests
    await shared.apply(ledger.report(NOW), 2.5)
    return ledger


async def requests_of(shared: SharedUsage, hour: int = NOW) -> int:
    (found,) = await shared.read([hour])
    return sum(row.requests for row in found.rows.values())


async def test_a_redis_that_starts_empty_gets_all_hours_back(shared, copies, registry) -> None:
    await use(shared, "ended", 3)
    await copies.save()
    await registry.send(("FLUSHALL",))
    await copies.restore()
    (found,) = await shared.read([NOW])
    assert found.rows == {TEAM: Counters(requests=3)} and found.price_per_hour == 2.5
    assert await requests_of(shared, NOW - 1) == 3
    (left_ms,) = await registry.send(("PTTL", registry.key("usage:hours", str(NOW))))
    assert left_ms > 0


async def test_a_copy_does_not_replace_what_is_newer(shared, copies) -> None:
    ledger = await use(shared, "one")
    await copies.save()
    older = await shared.fields(NOW)
    ledger.row(TEAM).requests += 5
    await shared.apply(ledger.report(NOW))
    await copies.restore()
    assert await requests_of(shared) == 6
    await shared.restore(NOW, older)  # another process wrote meanwhile
    assert await requests_of(shared) == 6


async def test_a_loss_is_noticed_and_the_copy_stays_whole(shared, copies, registry) -> None:
    await use(shared, "ended", 3)
    await copies.save()
    await registry.send(("FLUSHALL",))
    await use(shared, "other", 1)
    await copies.save()
    assert await requests_of(shared) == 4
    await registry.send(("FLUSHALL",))
    await copies.restore()
    assert await requests_of(shared) == 4


async def test_old_and_damaged_copies_are_left_out(shared, copies, tmp_path) -> None:
    await use(shared, "one")
    await copies.save()
    old = tmp_path / "usage" / f"{NOW - KEPT_DAYS * 24 - 1}.json"
    old.write_text("{}")
    (tmp_path / "usage" / f"{NOW - 5}.json").write_text("no JSON")
    (tmp_path / "usage" / "notes.json").write_text("{}")
    await copies.restore()
    await copies.save()
    assert not old.exists()
    assert await requests_of(shared) == 1


async def test_the_task_restores_first_and_saves_at_the_end(
    shared, copies, registry, tmp_path
) -> None:
    await use(shared, "ended", 3)
    await copies.save()
    await registry.send(("FLUSHALL",))
    again = UsageCopies(shared, tmp_path / "usage", pytest.fail)
    again.start()
    while not await requests_of(shared):
        await asyncio.sleep(0.01)
    await use(shared, "last", 2)
    await again.close()
    await registry.send(("FLUSHALL",))
    await copies.restore()
    assert await requests_of(shared) == 5


async def test_without_redis_nothing_is_written(shared, copies, redis_server, tmp_path) -> None:
    redis_server.kill()
    with pytest.raises(RegistryUnavailableError):
        await copies.save()
    await copies.close()
    assert not (tmp_path / "usage").exists()
