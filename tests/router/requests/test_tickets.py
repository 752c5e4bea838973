"""The order of requests over all routers does not come from a clock."""

import asyncio
import contextlib
import random
import time

import pytest

from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.local.redis_server import EmbeddedRedis
from router.routing.requests import tickets as module
from router.routing.requests.tickets import TicketFeed, Tickets
from tests.router.conftest import until
from tests.router.emulated_worker import Script

HOUR_NS = 3600 * 10**9


class Counter:
    """What Redis does, without Redis."""

    def __init__(self) -> None:
        self.last, self.away = 0, False

    async def take_tickets(self, count: int, above: int) -> int:
        if self.away:
            raise RegistryUnavailableError("away")
        self.last = max(self.last, above) + count
        return self.last - count + 1


@pytest.fixture
def clock(monkeypatch):
    """Steps the wall clock: ``clock(ns)``."""
    real = time.time_ns

    def step(by_ns: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: real() + by_ns)
        monkeypatch.setattr("router.routing.requests.gateway.time_ns", time.time_ns, raising=False)

    return step


def test_tickets_rise_by_one_place_and_two_routers_never_draw_the_same():
    one, two = Tickets(mark=1), Tickets(mark=2)
    drawn = [router.draw() for _ in range(50) for router in (one, two)]
    assert len(set(drawn)) == 100
    assert drawn == sorted(drawn)
    one.seen(two.draw())
    assert one.draw() > drawn[-1]
    assert one.place == 52


def test_what_is_seen_never_takes_the_order_back_or_out_of_its_room():
    tickets = Tickets(mark=0)
    tickets.seen(1_700_000_000_000_000)  # of an earlier version: microseconds
    place = tickets.place
    assert tickets.draw() > 1_700_000_000_000_000
    tickets.seen(5)
    tickets.seen(2**64 - 1)
    assert tickets.place == place + 1
    assert tickets.draw() < 2**64


@pytest.mark.parametrize("redis", ["there", "away", "comes and goes"])
async def test_two_routers_stay_fair_while_clocks_step(clock, redis):
    """Defect 12: a router whose clock had jumped ahead lost every tie from then on.

    The later of two requests is preempted first: of those that came more than one report apart,
    the one that came first has the lower ticket, whichever router took it.
    """
    pick = random.Random(1)
    counter, reported = Counter(), 0
    routers = [Tickets(mark=1), Tickets(mark=2)]
    feeds = [TicketFeed(router, counter, lambda _: None) for router in routers]
    came: list[tuple[int, int]] = []
    for round_number in range(60):
        clock(pick.choice((-1, 0, 1)) * HOUR_NS)
        counter.away = redis == "away" or (redis != "there" and round_number % 20 > 9)
        for router, feed in zip(routers, feeds, strict=True):
            router.seen(reported)
            await feed.take()
        for _ in range(pick.randrange(20)):
            busy = pick.random() < 0.9  # one router has nine times the load of the other
            came.append((round_number, routers[0 if busy else 1].draw()))
        reported = max((ticket for _, ticket in came), default=0)
    tickets = [ticket for _, ticket in came]
    assert len(set(tickets)) == len(tickets)
    for at, first in came:
        assert all(first < later for when, later in came if when > at)


async def test_two_routers_keep_their_order_at_a_worker_while_clocks_step(make_fleet, clock):
    """Defect 12: with real gRPC, and nothing shared but the worker."""
    one, two = await make_fleet({}), await make_fleet({})
    worker = await one.add("decode-0", Script(step_s=0.001))
    two.directory.put(one.lane.gateway.workers.get("decode-0").record)
    await until(lambda: two.state("decode-0") == "ready")
    for fleet, step in ((one, 1), (two, 0), (one, -1), (two, 1), (two, 0), (one, 0)):
        clock(step * HOUR_NS)
        assert (await fleet.chat(max_tokens=1)).status_code == 200
        await asyncio.sleep(0.25)  # until both have read a report
    assert [s.ticket for s in worker.submissions] == sorted(s.ticket for s in worker.submissions)


async def test_the_counter_in_redis_goes_on_above_what_routers_know(monkeypatch):
    monkeypatch.setattr(module, "TAKE_EVERY_S", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        server = EmbeddedRedis()
        server.start()
        stack.callback(server.stop)
        registry = Registry(server.url, "test")
        stack.push_async_callback(registry.close)
        assert await registry.take_tickets(10, 0) == 1
        assert await registry.take_tickets(10, 0) == 11
        first = await registry.take_tickets(10, 500)
        assert first > 500
        assert await registry.take_tickets(1, 0) > first + 9
        taken = await asyncio.gather(*(registry.take_tickets(5, 700 + n) for n in range(20)))
        places = [place for first in taken for place in range(first, first + 5)]
        assert len(set(places)) == 100

        tickets = Tickets()
        feed = TicketFeed(tickets, registry, lambda _: None)
        feed.start()
        stack.push_async_callback(feed.close)
        await until(lambda: tickets.place > max(places))
        await registry.send(("FLUSHALL",))
        before = tickets.place
        await until(lambda: tickets.place > before)
        server.kill()
        ticket = tickets.draw()
        assert tickets.draw() > ticket
