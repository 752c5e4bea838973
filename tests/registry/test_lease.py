"""Who runs a fleet: one at a time, with a real Redis that may be emptied."""

import redis.asyncio

from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.lease import LEASE_S, FleetLease, LeaseHolder
from baton.registry.redis_store import Registry
from baton.registry.wanted_sizes import Wanted, forget, read, write
from fleet.local.redis_server import EmbeddedRedis


def lease(registry: Registry, life: str) -> FleetLease:
    holder = LeaseHolder(life=life, host=f"host-{life}", pid=7, url="http://h:8000", since_s=0.0)
    return FleetLease(registry, holder)


async def test_one_holds_it_and_the_other_is_told_who(registry: Registry) -> None:
    one, two = lease(registry, "one"), lease(registry, "two")
    assert await one.take() is None
    assert await two.take() == one.me
    assert await one.renew() is None
    assert "`baton up` on host-one (pid 7, http://h:8000" in str(one.me)
    await two.give_up()
    assert await two.take() == one.me, "what is not one's own is not given up"
    await one.give_up()
    assert await two.take() is None


async def test_a_renewal_shows_that_the_holder_lives(registry: Registry) -> None:
    one = lease(registry, "one")
    assert await one.left_ms() < 0
    await one.take()
    await registry.send(("PEXPIRE", registry.key("lease"), 500))
    before = await one.left_ms()
    await one.renew()
    assert before <= 500 < await one.left_ms() <= LEASE_S * 1000


async def test_it_is_taken_by_force_and_the_earlier_holder_learns_of_it(registry: Registry) -> None:
    one, two = lease(registry, "one"), lease(registry, "two")
    await one.take()
    assert await two.take(by_force=True) is None
    assert await one.renew() == two.me
    assert await two.renew() is None


async def test_an_emptied_redis_gives_it_back_to_whoever_is_first(
    registry: Registry, redis_server: EmbeddedRedis
) -> None:
    one, two = lease(registry, "one"), lease(registry, "two")
    await one.take()
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        await client.flushall()
        assert await one.renew() is None
        await client.flushall()
    assert await two.take() is None
    assert await one.renew() == two.me


async def test_a_lease_that_nobody_can_read_is_nobodys(registry: Registry) -> None:
    await registry.send(("SET", registry.key("lease"), b"\xc1garbage"))
    assert await lease(registry, "one").take() is None


async def test_orders_go_to_the_controller_and_answers_come_back(registry: Registry) -> None:
    orders = AdminCommands(registry)
    assert await orders.ask("ping", timeout_s=0.1) is None, "nobody is there"
    await registry.send(("LPUSH", registry.key("orders"), b"\xc1garbage"))
    first = await orders.take()
    assert first is not None and (first.verb, first.arguments) == ("ping", {})
    assert await orders.take() is None, "what cannot be read is skipped"
    await orders.answer(first, CommandReply(data={"x": [1, "two"]}))
    raw = (await registry.send(("GET", registry.key("answer", first.token))))[0]
    assert raw is not None


async def test_wishes_are_those_of_one_file(registry: Registry) -> None:
    await write(registry, Wanted(of="file", pools={"decode": 3}, closed_nodes=("10.0.0.1",)))
    assert (await read(registry, "file")).pools == {"decode": 3}
    other = await read(registry, "other")
    assert other == Wanted(of="other", closed_nodes=("10.0.0.1",)), "nodes are no file's"
    await forget(registry)
    assert await read(registry, "file") == Wanted(of="file")
