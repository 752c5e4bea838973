"""Places of connections when all are taken: the table, and a router with four of them."""

import asyncio
import contextlib

from hypothesis import given
from hypothesis import strategies as st

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from router.frontend.http.places import Places, capacity
from tests.router.api.test_slow_clients import ended
from tests.router.conftest import until
from tests.router.emulated_worker import Script
from tests.telemetry.values import value_of

KEYS = {"key-of-one": ApiKeyConfig(tenant="one")}
KEYED = b"authorization: Bearer key-of-one\r\n"


def full(limit: int = 4, **more) -> Places[int]:
    places = Places(limit, **more)
    assert all(places.enter(number, "127.0.0.1") is None for number in range(limit))
    return places


def test_the_longest_idle_one_gives_way_first_without_a_key():
    places = full()
    for number in (3, 2, 1):
        places.claim(number)
        places.rest(number, has_key=number == 3)
    assert [places.enter(number, "127.0.0.1") for number in range(4, 7)] == [2, 1, 3]
    assert len(places) == 4


def test_a_request_in_the_reserve_takes_the_place_of_the_longest_silent_one():
    places = full()
    places.enter(4, "127.0.0.1")
    assert places.is_in_reserve
    assert places.claim(4) == 0
    assert not places.is_reserved(4)
    for number in (1, 2, 3):
        assert places.claim(number) is None
    places.enter(5, "127.0.0.1")
    assert places.claim(5) is None  # all are busy
    assert places.is_reserved(5)


def test_silent_connections_cannot_hold_the_reserve():
    places = full()
    entered = [places.enter(number, "127.0.0.1") for number in range(4, 100)]
    assert len(places) == capacity(4)
    assert not places.is_full
    assert [one for one in entered if one is not None] == list(range(100 - capacity(4)))


def test_a_router_whose_reserve_is_busy_is_full():
    places = full()
    for number in range(4):
        places.claim(number)
    for number in range(4, capacity(4)):
        assert places.enter(number, "127.0.0.1") is None
        assert places.claim(number) is None
        assert not places.is_full
    assert places.enter(100, "127.0.0.1") is None
    assert places.is_full


def test_an_address_has_half_of_the_places_unless_it_stands_for_many_clients():
    for address, is_limited in (
        ("192.0.2.1", True),
        ("2001:db8::1", True),
        ("10.1.2.3", False),  # a proxy
        ("127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("", False),  # a Unix socket
    ):
        places = Places(8, ("10.0.0.0/8",))
        for number in range(5):
            places.enter(number, address)
        assert places.is_reserved(4) is is_limited
        places.enter(5, "192.0.2.99")
        assert not places.is_reserved(5)
        places.leave(0)
        assert not places.is_reserved(4)


def test_the_ipv6_addresses_of_one_network_count_together():
    places = Places(8)
    for number in range(5):
        places.enter(number, f"2001:db8::{number}")
    assert places.is_reserved(4)
    places.enter(5, "2001:db8:0:1::1")
    assert not places.is_reserved(5)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), max_size=200))
def test_places_are_never_lost(steps):
    places, held = Places(4), set()
    for step, number, flag in steps:
        if step < 2 and number not in held:
            held.add(number)
            held.discard(places.enter(number, "192.0.2.1" if flag else "127.0.0.1"))
            if places.is_full:
                places.leave(number)
                held.discard(number)
        elif step == 2 and number in held:
            held.discard(places.claim(number))
        elif step == 3:
            places.rest(number, has_key=flag)
        elif step == 4:
            places.await_header(number)
        elif step == 5:
            places.leave(number)
            held.discard(number)
        assert len(places) == len(held) <= capacity(4)


class Client:
    """One connection."""

    def __init__(self, fleet) -> None:
        self._port = int(fleet.url.rpartition(":")[2])

    async def send(self, path: bytes, more: bytes = b"", body: bytes = b"") -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        method = b"POST" if body else b"GET"
        head = b"%b %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
        self.writer.write(head % (method, path, more, len(body)) + body)
        return self

    async def status(self) -> int:
        async with asyncio.timeout(10):
            return int((await self.reader.readline()).split()[1])

    async def is_closed(self) -> bool:
        await ended(self.reader)
        self.writer.close()
        return True


async def status(fleet, path: bytes, more: bytes = b"") -> int:
    client = await Client(fleet).send(path, more)
    found = await client.status()
    client.writer.close()
    return found


async def test_idle_connections_shut_no_one_out(make_fleet):
    """4,096 of them did, the liveness probe too."""
    fleet = await make_fleet({}, api_keys=KEYS, clients=ClientLimitsConfig(max_connections=4))
    early = [await Client(fleet).send(b"/health/live") for _ in range(2)]
    assert [await one.status() for one in early] == [200] * 2
    keyed = await Client(fleet).send(b"/v1/models", KEYED)
    assert await keyed.status() == 200
    idle = [await Client(fleet).send(b"/health/live") for _ in range(8)]
    assert [await one.status() for one in idle] == [200] * 8
    for one in idle[:4]:
        assert await one.is_closed()
    assert value_of(fleet.router.metrics, "baton_connections_evicted") >= 4
    assert await status(fleet, b"/v1/models", KEYED) == 200
    assert await status(fleet, b"/health/live") == 200
    keyed.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n" % KEYED)
    assert (await ended(keyed.reader)).count(b"HTTP/1.1 200") == 1  # it kept its place
    for one in (keyed, *early, *idle):
        one.writer.close()


async def test_busy_connections_leave_places_for_probes_and_keys(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(step_s=1)}, api_keys=KEYS, clients=ClientLimitsConfig(max_connections=4)
    )
    body = b'{"model": "smollm2", "prompt": "hi", "max_tokens": 50, "stream": true}'
    busy = [await Client(fleet).send(b"/v1/completions", KEYED, body) for _ in range(4)]
    await until(lambda: len(fleet.workers["decode-0"].submissions) == 4)
    assert await status(fleet, b"/v1/models") == 503  # not 401: it has no place
    assert await status(fleet, b"/v1/models", b"authorization: Bearer no\r\n") == 503
    assert value_of(fleet.router.metrics, "baton_connections_refused") == 2
    assert await status(fleet, b"/health/live") == 200
    assert await status(fleet, b"/v1/models", KEYED) == 200
    for one in busy:
        one.writer.close()


async def test_silent_connections_give_way_to_requests(make_fleet):
    fleet = await make_fleet({}, clients=ClientLimitsConfig(max_connections=4))
    port = int(fleet.url.rpartition(":")[2])
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        assert await status(fleet, b"/v1/models") == 200
        assert await status(fleet, b"/health/live") == 200
