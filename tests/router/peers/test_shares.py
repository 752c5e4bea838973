"""Routers' parts of the fleet's places: in virtual time, then two real ones over a real Redis."""

import asyncio
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.registry.redis_store import Registry
from baton.registry.router_demands import PlannedSizes, RouterDemand, RouterDemands, TenantDemand
from baton.types.errors import QueueFullError
from benchmarks.router.workers import SteppedWorker
from router.routing.admission.admission import Admission
from router.routing.admission.fair_queue import Waiting, equal_weights
from router.routing.peers.shares import SILENT_NS, Shares
from router.sources import LaneTables
from tests.router.conftest import record_of, until
from tests.telemetry.values import value_of

MS = 1_000_000
TOTAL = 64


def demand(beat: int = 1, queued: int = 0, **tenants: tuple[int, int]) -> RouterDemand:
    told = {name: TenantDemand(*figures) for name, figures in tenants.items()}
    return RouterDemand(beat=beat, queued=queued, tenants=told)


def windows(*demands: RouterDemand, total: int = TOTAL) -> list[int]:
    """What each of the routers takes as its own, when all have heard of all."""
    found = []
    for index, own in enumerate(demands):
        shares = Shares()
        others = {str(i): other for i, other in enumerate(demands) if i != index}
        shares.update(own, others, 0)
        found.append(shares.window(total))
    return found


# ---- the machine ------------------------------------------------------------------------------


def test_alone_all_is_its_own():
    shares = Shares()
    shares.update(demand(a=(5, 500)), {}, 0)
    assert (shares.window(TOTAL), shares.queue_limit(100)) == (TOTAL, 100)


def test_idle_routers_keep_room_for_a_burst_of_each():
    assert windows(demand(), demand()) == [32, 32]
    assert windows(demand(a=(8, 0)), demand()) == [36, 28]


def test_what_one_does_not_want_the_other_has():
    assert windows(demand(a=(0, 500)), demand()) == [64, 1]  # 1: it can always begin


def test_a_tenant_at_one_router_has_as_much_as_one_at_all():
    assert windows(demand(a=(0, 400)), demand(b=(0, 400), c=(0, 400))) == [21, 43]
    assert windows(demand(a=(0, 100)), demand(a=(0, 100), b=(0, 100))) == [16, 48]


def test_nobody_takes_what_another_still_holds():
    assert windows(demand(a=(64, 100)), demand(b=(0, 100)))[1] == 1
    assert windows(demand(a=(50, 100)), demand(b=(0, 100)))[1] == 14


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.tuples(st.just(0), st.integers(0, 90))),
        min_size=2,
        max_size=6,
    )
)
def test_together_they_keep_to_the_limit(tenants):
    found = windows(*(demand(**each) for each in tenants))
    assert sum(found) <= TOTAL + len(tenants)  # each rounds up, or has its one place


def test_who_is_silent_is_not_counted_and_later_named():
    shares, busy = Shares(), demand(a=(0, 500))
    shares.update(busy, {"x": demand(b=(0, 500))}, 0)
    assert shares.window(TOTAL) == 32
    shares.update(busy, {"x": demand(b=(0, 500))}, SILENT_NS)
    assert shares.window(TOTAL) == 64
    assert shares.gone(20 * SILENT_NS) == ["x"]
    shares.update(busy, {"x": demand(beat=2, b=(0, 500))}, SILENT_NS + MS)
    assert shares.window(TOTAL) == 32
    shares.alone()
    assert shares.window(TOTAL) == 64


def test_the_queue_is_shared_and_a_full_one_elsewhere_leaves_a_part():
    shares = Shares()
    shares.update(demand(), {"x": demand(queued=30)}, 0)
    assert shares.queue_limit(100) == 70
    shares.update(demand(), {"x": demand(beat=2, queued=100)}, 0)
    assert shares.queue_limit(100) == 50
    queue = Admission(100)
    queue.limit = 1
    queue.offer(Waiting(0, "1"), 0, expected_s=1)
    with pytest.raises(QueueFullError):
        queue.offer(Waiting(0, "2"), 0, expected_s=1)


# ---- several queues in virtual time -------------------------------------------------------------


class Simulated:
    """One router: its queue, what runs until when, what each tenant was served."""

    def __init__(self, weight_of=equal_weights) -> None:
        self.queue, self.shares = Admission(10**6, weight_of), Shares(weight_of)
        self.running: list[tuple[int, Waiting]] = []
        self.beat = self.number = 0

    def step(self, now_ms: int, waiting: dict[str, int], served: Counter) -> None:
        for tenant, least in waiting.items():
            while self.queue._waiting_of[tenant] < least:
                self.number += 1
                cost = 100.0 if tenant != "long" else 400.0
                entry = Waiting(0, f"{self.number}", 1, tenant, cost)
                self.queue.offer(entry, now_ms * MS, expected_s=1)
        for end_ms, entry in [it for it in self.running if it[0] <= now_ms]:
            self.running.remove((end_ms, entry))
            self.queue.release(1, now_ms * MS, entry.tenant)
            served[entry.tenant] += entry.cost_tokens
        while (entry := self.queue.pop(self.shares.window(TOTAL))) is not None:
            self.running.append((now_ms + int(entry.cost_tokens) * 5, entry))

    def told(self) -> RouterDemand:
        self.beat += 1
        return RouterDemand(beat=self.beat, queued=self.queue.waiting, tenants=self.queue.demands())


@pytest.mark.parametrize(
    "loads",
    [
        ({"a": 100}, {"a": 100, "b": 100}),
        ({"a": 100}, {"b": 100}),
        ({"a": 200}, {"b": 20, "c": 20}, {"a": 50, "c": 90}),
        ({"long": 100}, {"long": 100, "b": 100}),
    ],
)
def test_tenants_are_served_alike_over_all_routers_and_the_window_holds(loads):
    """Within 10 %, told every 200 ms at other times by each."""
    served = served_by([Simulated() for _ in loads], loads)
    mean = sum(served.values()) / len(served)
    assert all(abs(tokens / mean - 1) <= 0.1 for tokens in served.values()), served


@pytest.mark.parametrize("loads", [({"a": 200, "b": 200},), ({"a": 200}, {"b": 200})])
def test_tenants_are_served_by_weight_over_all_routers(loads):
    weight_of = {"a": 3.0, "b": 1.0}.__getitem__
    served = served_by([Simulated(weight_of) for _ in loads], loads)
    assert served["a"] / served["b"] == pytest.approx(3.0, abs=0.1 if len(loads) == 1 else 0.3)


def served_by(routers: list[Simulated], loads) -> Counter:
    """Return the tokens by tenant of 45 s; the window holds and no place stays empty."""
    told = {i: router.told() for i, router in enumerate(routers)}
    served: Counter = Counter()
    most = []
    for now_ms in range(0, 60_000, 20):
        if now_ms == 15_000:
            served.clear()
        for i, (router, waiting) in enumerate(zip(routers, loads, strict=True)):
            router.step(now_ms, waiting, served)
            if now_ms % 200 == i * 60:
                told[i] = router.told()
                others = {str(k): it for k, it in told.items() if k != i}
                for tenant, tokens in router.shares.update(told[i], others, now_ms * MS).items():
                    router.queue.served_elsewhere(tenant, tokens)
        if now_ms >= 15_000:
            most.append(sum(router.queue.running for router in routers))
    assert max(most) <= TOTAL * 1.1
    assert sum(most) / len(most) >= TOTAL * 0.9, "and no place stays empty"
    return served


async def test_a_router_reports_the_last_turn_by_which_it_places(make_fleet, redis_server):
    registry = Registry(redis_server.url, "turns")
    demands = RouterDemands(registry)
    fleet = await make_fleet({"a": None, "b": None}, tables=LaneTables.of(registry))
    fleet.directory.put(record_of("b", "127.0.0.1:1", role="prefill", turn=9))

    async def reported() -> int:
        return max((demand.turn for demand in (await demands.read()).values()), default=0)

    async with asyncio.timeout(5):
        while await reported() != 9:
            await asyncio.sleep(0.05)
    await registry.close()


async def test_routers_show_what_the_planner_wants_while_it_runs(make_fleet, redis_server):
    registry = Registry(redis_server.url, "plans")
    demands = RouterDemands(registry)
    fleet = await make_fleet({"a": None}, tables=LaneTables.of(registry))
    value = partial(value_of, fleet.router.metrics)

    async def shown(wanted: tuple[float, float, float]) -> None:
        async with asyncio.timeout(5):
            while wanted != (
                value("baton_planner_wanted", role="prefill"),
                value("baton_planner_wanted", role="decode"),
                value("baton_planner_load_ratio"),
            ):
                await asyncio.sleep(0.05)

    await demands.report_plan(PlannedSizes(prefill=3, decode=1, load=1.25))
    await shown((3, 1, 1.25))
    await registry.send(("DEL", registry.key("plan")))
    await shown((0, 0, 0))
    await registry.close()


# ---- two real routers -------------------------------------------------------------------------


@pytest.mark.slow
async def test_two_routers_keep_to_one_window_and_serve_tenants_alike(make_fleet, redis_server):
    """A tenant that asks both has no more than one that asks one of them."""
    registries = [Registry(redis_server.url, "shares") for _ in range(2)]
    window = 12
    worker = SteppedWorker("decode-0", 0.003, 8192)
    await worker.start()
    steps = asyncio.create_task(worker.run())
    fleets = [
        await make_fleet({}, window_requests=window, tables=LaneTables.of(one))
        for one in registries
    ]
    for fleet in fleets:
        fleet.directory.put(record_of("decode-0", worker.address))
        await until(lambda fleet=fleet: fleet.state("decode-0") == "ready")
    await until(lambda: all(fleet.lane.gateway.shares.routers == 2 for fleet in fleets))
    served: Counter = Counter()
    over = asyncio.Event()

    async def client(fleet, tenant: str) -> None:
        while not over.is_set():
            answer = await fleet.chat(headers={"x-baton-tenant": tenant}, max_tokens=8)
            assert answer.status_code == 200, answer.text
            served[tenant] += 1

    # Enough of each that some always wait: a tenant with none waiting loses its turn.
    places = [(fleets[0], "a", 24), (fleets[1], "a", 24), (fleets[1], "b", 48)]
    clients = [
        asyncio.create_task(client(fleet, tenant))
        for fleet, tenant, count in places
        for _ in range(count)
    ]
    gateways = [fleet.lane.gateway for fleet in fleets]
    await until(lambda: sum(served.values()) > 100, 30.0)
    await asyncio.sleep(2)  # some exchanges: until then tenant a has more places
    served.clear()
    running: list[int] = []
    while sum(served.values()) < 2000:
        running.append(sum(gateway.admission.running for gateway in gateways))
        await asyncio.sleep(0.01)
    over.set()
    counted = dict(served)
    await asyncio.gather(*clients)
    steps.cancel()
    await worker.stop()
    for registry in registries:
        await registry.close()
    assert sum(running) / len(running) <= window * 1.1
    assert sum(running) / len(running) >= window * 0.8
    assert 0.9 <= counted["a"] / counted["b"] <= 1.1, counted


async def test_without_redis_limits_are_local(make_fleet, redis_server):
    registry = Registry("redis://127.0.0.1:1", "shares")
    fleet = await make_fleet({"decode-0": None}, tables=LaneTables.of(registry))
    assert (await fleet.chat()).status_code == 200
    gateway = fleet.lane.gateway
    assert gateway.shares.routers == 1
    assert gateway.admission.limit == gateway.admission.max_waiting
    await registry.close()
