"""Issued keys with a real Redis: changes at once, losses, copies on disk, days of use."""

import asyncio
import logging
import os
import signal
import time

import msgspec
import pytest

from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.tenants.key_record import KeyRecord, issue, new_key
from baton.tenants.shared_keys import Change, SharedKeys
from router.synced_table import POLL_S
from router.tenants.key_exchange import (
    KeyChangeError,
    KeyExchange,
    UnconfirmedChangeError,
    UnknownKeyError,
)
from router.tenants.key_table import DAY_MS, KeyTable
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import until

__all__ = ["redis_server", "registry"]

TEAM = {"tenant": "team"}


def routers(registry: Registry, count: int = 2, file=None) -> list[KeyExchange]:
    return [KeyExchange(KeyTable(), SharedKeys(registry), file) for _ in range(count)]


def revoked(record: KeyRecord) -> KeyRecord:
    return msgspec.structs.replace(record, revoked_ms=5)


def replaced(new: KeyRecord):
    def edit(record: KeyRecord) -> KeyRecord:
        if record.replaced_by:
            raise KeyChangeError("it is replaced")
        return msgspec.structs.replace(record, replaced_by=new.id, retires_ms=7)

    return edit


def states(router: KeyExchange, now_ms: int = 6) -> list[str]:
    return [key.record.state(now_ms) for key in router.table]


async def test_one_comparison_brings_every_change(registry) -> None:
    assert POLL_S < 1, "a revoked key is refused within a second"
    one, two = routers(registry)
    records = [issue(new_key(), TEAM) for _ in range(600)]
    assert await one.add(records) == 600
    assert await two.add(records) == 0
    assert len(two.table) == 600
    await one.change(records[7].id, revoked)
    assert two.table.get(records[7].id).record.state(6) == "valid"
    await two.exchange()
    assert two.table.get(records[7].id).record.state(6) == "revoked"
    assert states(two).count("valid") == 599
    with pytest.raises(UnknownKeyError):
        await two.change("aaaaaaaaaaaa", revoked)


async def test_only_what_changed_is_read_again(registry, monkeypatch) -> None:
    one, two = routers(registry)
    records = [issue(new_key(), TEAM) for _ in range(3)]
    await one.add(records)
    await two.exchange()
    await one.exchange()
    read = []
    some = SharedKeys.some

    async def noted(shared, ids):
        read.append(set(ids))
        return await some(shared, ids)

    monkeypatch.setattr(SharedKeys, "records", lambda _: pytest.fail("all were read"))
    monkeypatch.setattr(SharedKeys, "some", noted)
    await two.exchange()
    assert read == []
    new = issue(new_key(), TEAM)
    await one.change(records[0].id, revoked)
    await one.change(records[1].id, replaced(new), lambda _: new)
    read.clear()
    await two.exchange()
    assert read == [{records[0].id, records[1].id, new.id}]
    assert sorted(states(two)) == sorted(states(one)) == ["revoked", *["valid"] * 3]
    await two.exchange()
    assert len(read) == 1


async def test_a_router_that_missed_many_changes_reads_all(registry) -> None:
    one, two = routers(registry)
    for number in range(70):
        await one.add([issue(new_key(), TEAM)])
        if number == 0:
            await two.exchange()
    (kept,) = await registry.send(("LLEN", registry.key("keys", "log")))
    assert kept == 64
    await two.exchange()
    assert len(two.table) == 70


async def test_an_id_means_one_key(registry) -> None:
    one, two = routers(registry)
    first, second = new_key(), new_key()
    await one.add([issue(first, TEAM)])
    for other in (issue(first[:16] + second[16:], TEAM), issue(first, {"tenant": "other"})):
        with pytest.raises(KeyChangeError, match="exists with other rights"):
            await two.add([other])
    assert two.table.find(first).rights.tenant == "team"


async def test_changes_at_the_same_time_are_all_made(registry) -> None:
    fleet = routers(registry, 4)
    record = issue(new_key(), TEAM)
    await fleet[0].add([record])
    others = [issue(new_key(), TEAM) for _ in range(3)]
    work = [router.change(record.id, revoked) for router in fleet]
    work += [router.add([new]) for router, new in zip(fleet, others, strict=False)]
    await asyncio.gather(*work)
    successors = [issue(new_key(), TEAM) for _ in range(2)]
    rotated = [
        router.change(others[0].id, replaced(new), lambda _, new=new: new)
        for router, new in zip(fleet, successors, strict=False)
    ]
    ends = await asyncio.gather(*rotated, return_exceptions=True)
    assert sorted(isinstance(end, KeyChangeError) for end in ends) == [False, True]
    for router in fleet:
        await router.exchange()
        assert len(router.table) == 5, "the one that came too late has made no key"
        assert router.table.get(record.id).record.state(6) == "revoked"


async def test_a_lost_table_is_written_again(registry) -> None:
    one, two = routers(registry)
    records = [issue(new_key(), TEAM) for _ in range(300)]
    await one.add(records)
    await two.exchange()
    await registry.send(("FLUSHALL",))
    (late,) = routers(registry, 1)
    await asyncio.gather(*(router.exchange() for router in (late, one, two)))
    await late.exchange()
    assert len(late.table) == 300
    gone = [record.id for record in records[:50]]
    await registry.send(("HDEL", registry.key("keys"), *gone))  # the mark stays
    await one.exchange()
    (again,) = routers(registry, 1)
    await again.exchange()
    assert len(again.table) == 300


async def test_a_revocation_survives_a_redis_that_returns_with_old_data(registry) -> None:
    one, two = routers(registry)
    record = issue(new_key(), TEAM)
    await one.add([record])
    (old,) = await registry.send(("HGET", registry.key("keys"), record.id))
    await one.change(record.id, revoked)
    await registry.send(("HSET", registry.key("keys"), record.id, old))
    await registry.send(("SET", registry.key("keys", "mark"), "of the past"))
    await two.exchange()
    assert states(two) == ["valid"]
    await one.exchange()
    await two.exchange()
    assert states(one) == states(two) == ["revoked"]


async def test_a_damaged_record_opens_nothing_and_is_written_again(registry, caplog) -> None:
    one, two = routers(registry)
    record = issue(new_key(), TEAM)
    await one.add([record])
    good = {"sha256": "0" * 64, "rights": TEAM, "created_ms": 1}
    damaged = {
        record.id: b"{",
        "bbbbbbbbbbbb": b"\xff",
        "cccccccccccc": msgspec.json.encode({**good, "id": "dddddddddddd"}),
        "eeeeeeeeeeee": msgspec.json.encode({**good, "id": "eeeeeeeeeeee", "rights": {"x": 1}}),
        "ffffffffffff": msgspec.json.encode({**good, "id": "ffffffffffff", "sha256": "0"}),
    }
    await two._shared.put([Change(b"", issue(new_key(), TEAM))])
    for name, raw in damaged.items():
        await registry.send(("HSET", registry.key("keys"), name, raw))
    await two.exchange()
    assert len(two.table) == 1
    for _ in range(3):
        await one.exchange()
    assert len(one.table) == 2
    await two.exchange()
    assert two.table.get(record.id) is not None
    skipped = [entry.message for entry in caplog.records if "skipping" in entry.message]
    assert len(skipped) == 5


async def test_without_redis_the_last_keys_stay_and_it_is_logged(
    registry, redis_server, tmp_path, caplog
) -> None:
    file = tmp_path / "keys.json"
    (router,) = routers(registry, 1, file)
    secret = new_key()
    ended = issue(new_key(), TEAM)
    await router.add([issue(secret, TEAM), ended])
    await router.change(ended.id, revoked)
    await router.start()
    assert (file.stat().st_mode & 0o777) == 0o600
    assert secret[16:] not in file.read_text()
    redis_server.kill()
    with caplog.at_level(logging.INFO):
        await until(lambda: "using the last known API keys=2" in caplog.text)
        before_s = router.table.compared_s
        assert router.table.find(secret).record.state(6) == "valid"
        for call in (router.add([issue(new_key(), TEAM)]), router.change(ended.id, revoked)):
            with pytest.raises(RegistryUnavailableError):
                await call
        assert len(router.table) == 2
        await router.close()

        (again,) = routers(registry, 1, file)
        await again.start()
        assert again.table.find(secret).record.state(6) == "valid"
        assert again.table.get(ended.id).record.state(6) == "revoked"
        assert again.table.compared_s < before_s + 5 and again.away
        await until(lambda: caplog.text.count("using the last known API keys=2") == 2)
        redis_server.start()
        await until(lambda: "compared API keys=2 with Redis again" in caplog.text)
    assert again.table.compared_s > before_s
    await again.close()
    (late,) = routers(registry, 1)
    await late.exchange()
    assert sorted(states(late)) == ["revoked", "valid"], "the new Redis has them from the copy"


async def raises_within(call, limit_s: float) -> RegistryUnavailableError:
    began_s = time.monotonic()
    with pytest.raises(RegistryUnavailableError) as caught:
        await call
    assert time.monotonic() < began_s + limit_s
    return caught.value


async def test_a_change_fails_at_once_while_redis_hangs_and_is_not_made_later(
    registry, redis_server
) -> None:
    (router,) = routers(registry, 1)
    record, new = issue(new_key(), TEAM), issue(new_key(), TEAM)
    await router.add([record])
    await router.start()
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(POLL_S)  # its own comparison waits, too
        edits = router.change(record.id, replaced(new), lambda _: new)
        calls = (router.add([issue(new_key(), TEAM)]), router.change(record.id, revoked), edits)
        for call in calls:
            error = await raises_within(call, 2.0)
            assert not isinstance(error, UnconfirmedChangeError), "nothing was sent"
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    await router.close()
    await router.exchange()
    assert states(router) == ["valid"] and not router.table.get(record.id).record.replaced_by


async def test_a_change_that_redis_receives_too_late_is_not_made(
    registry, redis_server, monkeypatch
) -> None:
    (router,) = routers(registry, 1)
    record, new = issue(new_key(), TEAM), issue(new_key(), TEAM)
    await router.add([record])
    put = SharedKeys.put

    async def stopped(shared, *arguments):
        os.kill(redis_server.pid, signal.SIGSTOP)
        return await put(shared, *arguments)

    monkeypatch.setattr(SharedKeys, "put", stopped)
    for call in (router.change(record.id, revoked), router.add([new])):
        try:
            error = await raises_within(call, 2.0)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        assert isinstance(error, UnconfirmedChangeError)
        await asyncio.sleep(0.3)
        await router.exchange()
        assert states(router) == ["valid"]


async def test_a_revoked_key_stays_revoked_when_redis_restarts(registry, redis_server) -> None:
    one, two = routers(registry)
    record = issue(new_key(), TEAM)
    await one.add([record])
    await one.change(record.id, revoked)
    assert states(one) == ["revoked"], "at once, without another comparison"
    redis_server.kill()
    with pytest.raises(RegistryUnavailableError):
        await one.exchange()
    redis_server.start()
    await one.exchange()
    await two.exchange()
    assert states(one) == states(two) == ["revoked"]


@pytest.mark.parametrize("content", [b"", b"{", b"[{}]", b"\xff"])
async def test_a_damaged_copy_is_skipped(registry, tmp_path, content, caplog) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(content)
    (router,) = routers(registry, 1, file)
    await router.start()
    assert len(router.table) == 0 and "cannot read API keys" in caplog.text
    await router.close()


async def test_days_of_use_are_written_once_and_found_by_every_router(registry, redis_server):
    one, two = routers(registry)
    keys = [issue(new_key(), TEAM) for _ in range(2)]
    await one.add(keys)
    await two.exchange()
    day = time.time_ns() // 1_000_000 // DAY_MS
    one.table.note_use(one.table.get(keys[0].id), day * DAY_MS)
    assert await two.used() == {}
    await one.exchange()
    assert await two.used() == {keys[0].id: day}
    await registry.send(("HSET", registry.key("keys", "used"), keys[0].id, 1))
    one.table.note_use(one.table.get(keys[0].id), day * DAY_MS)
    await one.exchange()
    assert await two.used() == {keys[0].id: 1}, "it was written once"
    await registry.send(("FLUSHALL",))
    for _ in range(3):
        await one.exchange()
    assert await two.used() == {keys[0].id: day}, "Redis has lost it"
    one.table.note_use(one.table.get(keys[1].id), day * DAY_MS)
    redis_server.kill()
    with pytest.raises(RegistryUnavailableError):
        await one.exchange()
    with pytest.raises(RegistryUnavailableError):
        await one._report_use()
    assert one.table.used == {keys[1].id: day}
    assert await one.used() == {keys[0].id: day, keys[1].id: day}


async def test_the_exchange_continues_after_a_fault(registry, monkeypatch) -> None:
    (router,) = routers(registry, 1)
    summary = SharedKeys.summary
    calls = []

    async def stumble(shared):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("by design")
        return await summary(shared)

    failures = []
    router = KeyExchange(KeyTable(), SharedKeys(registry), None, failures.append)
    monkeypatch.setattr("router.synced_table.POLL_S", 0.01)
    monkeypatch.setattr(SharedKeys, "summary", stumble)
    await router.start()
    await until(lambda: router.table.compared_s is not None)
    await router.close()
    assert failures == ["keys"]


async def test_a_key_revoked_without_redis_is_revoked_everywhere_once_redis_answers(
    registry, redis_server, tmp_path
) -> None:
    one, two = routers(registry, file=tmp_path / "keys.json")
    record, other = issue(new_key(), TEAM), issue(new_key(), TEAM)
    await one.add([record, other])
    await two.exchange()
    os.kill(redis_server.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        revoking = asyncio.create_task(one.revoke(record.id, 5))
        await asyncio.sleep(0)
        assert sorted(states(one)) == ["revoked", "valid"], "before Redis is tried"
        assert (await revoking)[1] is False
        assert time.monotonic() < began_s + 1.0
        with pytest.raises(UnknownKeyError):
            await one.revoke("aaaaaaaaaaaa", 5)
        assert sorted(states(one)) == ["revoked", "valid"]
        with pytest.raises(RegistryUnavailableError):
            await one.exchange()
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await one.exchange()
    await two.exchange()
    assert sorted(states(two)) == ["revoked", "valid"]
    assert two.table[record.id].record.revoked_ms == 5


async def test_a_revocation_is_in_redis_when_it_returns_also_of_a_key_just_issued_elsewhere(
    registry,
) -> None:
    one, two = routers(registry)
    records = [issue(new_key(), TEAM) for _ in range(3)]
    await one.add(records)
    await two.exchange()
    assert (await one.revoke(records[0].id, 5, everywhere=False))[1] is False
    await two.change(records[1].id, replaced(records[2]))  # one has an older state of it
    for record in records[1:]:
        key, is_shared = await one.revoke(record.id, 5)
        assert (key.record.revoked_ms, is_shared) == (5, True)
    assert (await one.revoke(records[1].id, 9))[0].record.revoked_ms == 5
    (late,) = routers(registry, 1)
    assert (await late.revoke(records[2].id, 9))[1], "it asks Redis for keys that it does not know"
    assert states(late) == ["revoked"] * 3
    assert late.table[records[1].id].record.replaced_by == records[2].id


async def test_a_key_revoked_without_redis_stays_so_after_a_restart(
    registry, redis_server, tmp_path
) -> None:
    file = tmp_path / "keys.json"
    (one,) = routers(registry, 1, file)
    record = issue(new_key(), TEAM)
    await one.add([record])
    redis_server.kill()
    assert (await one.revoke(record.id, 5))[1] is False
    (again,) = routers(registry, 1, file)
    await again.start()
    assert states(again) == ["revoked"]
    compared_s = again.table.compared_s
    redis_server.start()
    await until(lambda: again.table.compared_s > compared_s)
    await again.close()
    (late,) = routers(registry, 1)
    await late.exchange()
    assert states(late) == ["revoked"]
