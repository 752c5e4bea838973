"""Responses in a real Redis: whose they are, how long they stay, how much they may take."""

import asyncio

import pytest

from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.stored_responses import StoredResponses, StoreLimits
from tests.registry.conftest import eventually


def stored(registry: Registry, **limits) -> StoredResponses:
    defaults = {"keep_s": 60.0, "tenant_bytes": 1000, "total_bytes": 2000}
    return StoredResponses(registry, StoreLimits(**defaults | limits))


async def keys(registry: Registry) -> list[bytes]:
    (found,) = await registry.send(("KEYS", "*responses*"))
    return sorted(found)


async def total(registry: Registry, name: str = "") -> int:
    (bytes_,) = await registry.send(("HGET", registry.key("responses", "totals"), name))
    return int(bytes_ or 0)


async def test_a_response_is_its_tenants_alone(registry):
    store = stored(registry)
    await store.put("one", "resp_1", b"\x00secret\xff")
    assert await store.get("one", "resp_1") == b"\x00secret\xff"
    assert await store.get("two", "resp_1") is None
    assert await store.get("one resp_1", "") is None
    assert not await store.delete("two", "resp_1")
    assert await store.get("one", "resp_1") is not None
    assert await store.delete("one", "resp_1")
    assert not await store.delete("one", "resp_1")
    assert await store.get("one", "resp_1") is None
    assert (await total(registry), await total(registry, "one")) == (0, 0)


async def test_a_name_that_is_none_finds_nothing(registry):
    store = stored(registry)
    await store.put("one", "resp_1", b"x")
    for name in ("", "a b", "a\nb", "a" * 65, "*", "../x", "of one", "é"):
        assert await store.get("one", name) is None
        assert not await store.delete("one", name)
        assert await store.get("one", "resp_1") == b"x"


async def test_the_least_recently_used_of_the_tenant_goes_first(registry):
    store = stored(registry)
    await store.put("two", "resp_other", b"x" * 100)
    for number in range(3):
        await store.put("one", f"resp_{number}", b"x" * 300)
        await asyncio.sleep(0.003)
    await store.get("one", "resp_0")
    await store.put("one", "resp_3", b"x" * 300)
    found = [await store.get("one", f"resp_{number}") is not None for number in range(4)]
    assert found == [True, False, True, True]
    assert await store.get("two", "resp_other") is not None
    assert (await total(registry), await total(registry, "one")) == (1000, 900)


async def test_all_tenants_together_have_a_limit(registry):
    store = stored(registry)
    for number in range(30):
        await store.put(f"tenant-{number}", "resp_1", b"x" * 200)
    kept = [await store.get(f"tenant-{number}", "resp_1") is not None for number in range(30)]
    assert kept == [False] * 20 + [True] * 10
    assert await total(registry) == 2000
    (tenants,) = await registry.send(("HLEN", registry.key("responses", "totals")))
    assert tenants == 11, "those whose responses are gone are forgotten"


async def test_a_value_beyond_the_limit_leaves_nothing(registry):
    store = stored(registry)
    await store.put("one", "resp_1", b"x" * 1001)
    assert await store.get("one", "resp_1") is None
    assert await total(registry) == 0


async def test_time_takes_all_away(registry):
    store = stored(registry, keep_s=0.3)
    await store.put("one", "resp_1", b"x")
    for _ in range(4):  # use keeps it
        await asyncio.sleep(0.15)
        assert await store.get("one", "resp_1") == b"x"
    await store.put("two", "resp_2", b"yy")
    await asyncio.sleep(0.35)
    assert await store.get("one", "resp_1") is None
    assert await keys(registry) == []


async def test_what_expired_is_not_counted(registry):
    store = stored(registry, keep_s=0.2)
    await store.put("one", "resp_1", b"x" * 500)
    await asyncio.sleep(0.12)
    await store.put("two", "resp_2", b"x" * 10)  # the sums live on with this one
    await asyncio.sleep(0.12)
    await store.put("two", "resp_3", b"x" * 10)
    assert (await total(registry), await total(registry, "one")) == (20, 0)


async def test_many_at_once_agree_on_the_sums(registry):
    store = stored(registry, total_bytes=5000)
    puts = [store.put(f"t{n % 7}", f"resp_{n}", b"x" * (n + 1)) for n in range(100)]
    await asyncio.gather(*puts)
    (sizes,) = await registry.send(("HVALS", registry.key("responses", "sizes")))
    assert sum(map(int, sizes)) == await total(registry) <= 5000
    (members,) = await registry.send(("ZCARD", registry.key("responses", "all")))
    assert members == len(sizes)


async def test_without_redis_every_call_says_so(registry, redis_server):
    store = stored(registry)
    redis_server.stop()
    for call in (
        store.put("one", "resp_1", b"x"),
        store.get("one", "resp_1"),
        store.delete("one", "resp_1"),
    ):
        with pytest.raises(RegistryUnavailableError):
            await call
    await eventually(lambda: not registry.connected)


@pytest.mark.parametrize("gone", ["sizes", "all", "totals", "one resp_1"])
async def test_what_a_full_redis_drops_costs_no_later_response(registry, gone):
    """Without the sizes the sums stayed too high for good: of each tenant one response was kept."""
    store = stored(registry)
    for number in range(9):
        await store.put("one", f"resp_{number}", b"x" * 100)
    await registry.send(("DEL", registry.key("responses", gone)))
    for number in range(30):
        await store.put("one", f"resp_later{number}", b"x" * 100)
    found = [await store.get("one", f"resp_later{number}") for number in range(21, 30)]
    assert all(found)
    if gone != "totals":  # what it counted is not known any more
        assert await total(registry, "one") == 1000


async def test_sums_without_any_response_are_forgotten(registry):
    store = stored(registry)
    await registry.send(
        ("HSET", registry.key("responses", "totals"), "", 10**9, "one", 10**9),
    )
    await store.put("one", "resp_0", b"x" * 100)
    await store.put("one", "resp_1", b"x" * 100)
    await store.put("one", "resp_2", b"x" * 100)
    assert await store.get("one", "resp_1") is not None
    assert await store.get("one", "resp_2") is not None
