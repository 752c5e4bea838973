"""Limits by leases: never above the limit, hardly below it, whatever the network loses."""

import random
from datetime import datetime

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.tenants.bank import SILENT_MS
from baton.tenants.limits import Budget, Limits
from router.tenants.quota import EXCHANGE_NS, Never, Quotas, Wait
from router.tenants.quota import QuotaReservation as Taken
from tests.router.tenants.quota_world import MS, START_MS, TENANT, World
from tests.soak import examples
from tests.tenants.bank import Bank


def test_a_tenant_without_limits_has_nothing_to_take() -> None:
    quotas = Quotas("router")
    quotas.set_limits({"other": Limits(rpm=1), "none": Limits()})
    assert quotas.take("team", 10, 1, 10, 0) is None
    assert quotas.take("none", 10, 1, 10, 0) is None
    assert quotas.has_limits("other") and not quotas.has_limits("team")
    assert quotas.asks(0) == {}, "nothing is exchanged while nobody calls"


def test_a_fresh_key_with_100_tokens_serves_a_small_request() -> None:
    """The case of LiteLLM's LIT-3408: its answer may have 1024 tokens."""
    world = World(Limits(tpm=100), 1)
    found = world.call(world.nodes[0], prompt=10, answer=1024)
    assert isinstance(found, Taken) and found.tokens == 100
    world.end(world.nodes[0], answered=12)
    again = world.call(world.nodes[0], prompt=10, answer=1024)
    assert isinstance(again, Taken) and again.tokens == 22, "as the last answer was"
    third = world.call(world.nodes[0], prompt=10, answer=1024)
    assert isinstance(third, Taken), "56 of 100 are free"


def test_five_at_once_stay_below_a_limit_of_100() -> None:
    """The case of LiteLLM's issue 18730, where five used 663 tokens."""
    world = World(Limits(tpm=100), 1)
    found = [world.call(world.nodes[0], prompt=10, answer=120) for _ in range(5)]
    assert [type(one) for one in found] == [Taken, Wait, Wait, Wait, Wait]
    assert 60_000 * MS < found[1].ns <= 62_000 * MS
    assert (found[1].kind, found[1].limit) == ("tpm", 100)


def test_what_exceeds_a_limit_alone_never_fits() -> None:
    world = World(Limits(tpm=100), 1)
    assert world.call(world.nodes[0], prompt=100, answer=5) == Never("tpm", 100, 101)
    assert isinstance(world.call(world.nodes[0], prompt=100, answer=0), Taken), "an embedding"


def test_several_answers_charge_the_prompt_once() -> None:
    world = World(Limits(tpm=1000), 1)
    found = world.call(world.nodes[0], prompt=100, answer=50, choices=4)
    assert found.tokens == 300
    world.end(world.nodes[0], answered=80)
    assert world.nodes[0].quotas.standing(TENANT, world.now_ns)["tpm"].remaining == 820


def test_a_reservation_is_settled_once_and_a_debt_lowers_what_is_granted() -> None:
    world = World(Limits(tpm=1000), 2)
    here, there = world.nodes
    found = world.call(here, prompt=10, answer=40)
    world.end(here, answered=940)
    here.quotas.settle(found, 10, 940, world.now_ns)
    world.exchange(here)
    assert isinstance(world.call(there, prompt=10, answer=40, patient=True), Taken)
    assert isinstance(world.call(there, prompt=10, answer=40), Wait), "950 + 50 are used"
    world.end(there, answered=500)
    world.exchange(there)
    world.run(62.5, lambda *_: None)
    assert isinstance(world.call(there, prompt=10, answer=40), Taken)


@pytest.mark.parametrize("answered", [10, 0, 90])
def test_the_end_of_a_call_during_an_exchange_is_seen_at_once(answered: int) -> None:
    world = World(Limits(tpm=1000), 1)
    (node,) = world.nodes
    world.call(node, prompt=10, answer=40)
    grants = world.answered(world.asked(node))
    world.end(node, answered)
    node.quotas.granted(grants, world.now_ns)
    assert node.quotas.standing(TENANT, world.now_ns)["tpm"].remaining == 990 - answered
    world.exchange(node)
    assert node.quotas.standing(TENANT, world.now_ns)["tpm"].remaining == 990 - answered


def test_an_exhausted_day_is_named_and_lasts_until_midnight() -> None:
    world = World(Limits(tpd=1000, tpm=100_000), 2)
    assert isinstance(world.call(world.nodes[0], prompt=900, answer=100), Taken)
    world.run(70, lambda *_: None)
    found = world.call(world.nodes[1], prompt=10, answer=0)
    midnight_ms = 86_400_000 - world.clock_ms % 86_400_000
    assert (found.kind, found.ns) == ("tpd", midnight_ms * MS)
    world.pass_ms(midnight_ms)
    assert isinstance(world.call(world.nodes[1], prompt=10, answer=0), Taken)


@pytest.mark.parametrize(
    ("time", "end"),
    [
        ("2026-11-26T09:00:00", "2026-12-01T00:00:00"),
        ("2026-12-31T23:59:50", "2027-01-01T00:00:00"),
        ("2028-02-01T00:00:00", "2028-03-01T00:00:00"),
        ("2027-02-28T12:00:00", "2027-03-01T00:00:00"),
    ],
)
def test_a_budget_lasts_until_the_end_of_the_calendar_month(time: str, end: str) -> None:
    begin_ms, end_ms = (
        int(datetime.fromisoformat(f"{at}+00:00").timestamp() * 1000) for at in (time, end)
    )
    world = World(Limits(budget=Budget(tokens=100)), 2, clock_ms=begin_ms)
    one, two = world.nodes
    assert isinstance(world.call(one, prompt=60, answer=20), Taken)
    world.end(one, answered=20)
    world.run(1.5, lambda *_: None)  # unused leases return
    found = world.call(two, prompt=30, answer=0)
    assert isinstance(found, Wait) and found.kind == "budget"
    left_ms = end_ms - world.clock_ms
    assert left_ms - 1000 <= found.ns / MS <= left_ms, "it says when the month ends"
    found = world.call(two, prompt=20, answer=0, patient=True)
    assert isinstance(found, Taken), "20 of 100 were left"
    world.end(two, answered=0)
    world.exchange(two)
    world.pass_ms(end_ms - world.clock_ms - 300)
    for node in (one, two):
        world.exchange(node)
    assert isinstance(world.call(two, prompt=10, answer=0), Wait), "a moment before the end"
    world.pass_ms(400)
    assert isinstance(world.call(two, prompt=90, answer=10), Taken), "a new month"


def test_concurrent_requests_count_until_they_end_at_all_routers() -> None:
    world = World(Limits(concurrent=3), 2)
    here, there = world.nodes
    assert all(isinstance(world.call(here, 1, 1), Taken) for _ in range(2))
    assert isinstance(world.call(there, 1, 1), Taken)
    world.run(120, lambda *_: None)
    assert isinstance(world.call(there, 1, 1), Wait)
    world.end(there, answered=1)
    assert isinstance(world.call(there, 1, 1), Taken), "at once where one ended"
    world.end(here, answered=1)
    world.run(0.5, lambda *_: None)
    assert isinstance(world.call(there, 1, 1), Taken)
    assert isinstance(world.call(here, 1, 1), Wait)


def test_what_is_not_used_returns_after_a_second() -> None:
    world = World(Limits(rpm=10), 2)
    here, there = world.nodes
    for _ in range(4):
        assert isinstance(world.call(here, 1, 1), Taken)
    world.exchange(here)  # leases twice that
    got = [isinstance(world.call(there, 1, 1), Taken) for _ in range(6)]
    assert got.count(True) < 6
    world.run(1.5, lambda *_: None)
    got += [isinstance(world.call(there, 1, 1), Taken) for _ in range(7)]
    assert got.count(True) == 6


def test_the_lease_of_a_killed_router_returns_in_two_seconds() -> None:
    world = World(Limits(concurrent=4, rpm=600), 2)
    here, there = world.nodes
    for _ in range(4):
        assert isinstance(world.call(here, 1, 1), Taken)
    world.exchange(here)
    here.dead = True
    world.run(SILENT_MS / 1000 - 0.1, lambda *_: None)
    assert isinstance(world.call(there, 1, 1), Wait)
    world.run(0.2, lambda *_: None)
    assert isinstance(world.call(there, 1, 1), Taken)


def test_a_router_that_redis_forgot_reports_its_use_again() -> None:
    world = World(Limits(tpm=1000), 2)
    here, there = world.nodes
    world.call(here, prompt=900, answer=0)
    world.exchange(here)
    world.bank = type(world.bank)()
    world.run(1.5, lambda *_: None)
    assert isinstance(world.call(there, prompt=200, answer=0), Wait)
    assert isinstance(world.call(there, prompt=100, answer=0, patient=True), Taken)


@pytest.mark.parametrize("concurrent", [1, 100])
def test_a_redis_that_forgot_gets_the_use_of_a_tenant_that_has_not_called_since(concurrent) -> None:
    world = World(Limits(budget=Budget(tokens=100), concurrent=concurrent), 2)
    here, there = world.nodes
    world.call(here, prompt=60, answer=0)
    world.end(here, answered=0)
    world.run(100, lambda *_: None)
    world.bank = Bank()
    world.run(1, lambda *_: None)
    assert isinstance(world.call(there, prompt=50, answer=0), Wait)
    assert isinstance(world.call(there, prompt=40, answer=0, patient=True), Taken)


def test_without_redis_a_router_has_its_part_and_reports_it_afterwards() -> None:
    world = World(Limits(rpm=100), 2)
    here, there = world.nodes
    for _ in range(5):
        world.call(here, 1, 1)
    world.exchange(here)
    assert (here.quotas.standing(TENANT, world.now_ns)["rpm"].remaining) == 95
    here.quotas.leave_redis(routers=4)
    got = 0
    for _ in range(60):
        found = here.quotas.take(TENANT, 1, 1, 1, world.now_ns)
        if isinstance(found, Wait) and found.asks:
            here.quotas.exchange_here(world.now_ns)
            found = here.quotas.take(TENANT, 1, 1, 1, world.now_ns)
        got += isinstance(found, Taken)
    assert got == 20, "with the 5 before, a quarter of 100"
    here.quotas.return_to_redis()
    world.run(1.5, lambda *_: None)
    calls = [world.call(there, 1, 1, patient=True) for _ in range(90)]
    assert sum(isinstance(found, Taken) for found in calls) == 75


def test_changed_limits_apply_to_running_leases() -> None:
    world = World(Limits(rpm=100), 1)
    node = world.nodes[0]
    for _ in range(50):
        world.call(node, 1, 1)
    node.quotas.set_limits({TENANT: Limits(rpm=10, concurrent=60)})
    assert isinstance(world.call(node, 1, 1), Wait)
    node.quotas.set_limits({TENANT: Limits(concurrent=60)})
    assert isinstance(world.call(node, 1, 1), Taken)
    node.quotas.set_limits({})
    assert node.quotas.take(TENANT, 1, 1, 1, world.now_ns) is None
    world.end(node, 1)


def first_calls(limits: Limits, count: int) -> list:
    """Let a tenant without calls call each router, none of which may ask."""
    world = World(limits, count)
    world.run(1.5, lambda *_: None)
    return [node.quotas.take(TENANT, 1, 1, 10, world.now_ns) for node in world.nodes]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_first_call_of_an_idle_tenant_finds_a_lease_at_every_router(count: int) -> None:
    limits = Limits(rpm=8 * count, tpm=400_000, tpd=10**9, concurrent=8 * count)
    assert all(isinstance(found, Taken) for found in first_calls(limits, count))
    tiny = Limits(rpm=8 * count - 1, tpm=400_000)
    assert all(isinstance(found, Wait) and found.asks for found in first_calls(tiny, count))


def test_leases_ahead_of_calls_end_with_a_killed_router_and_return_when_little_is_left() -> None:
    world = World(Limits(rpm=320), 4)
    world.run(1.5, lambda *_: None)
    here, *others = world.nodes
    others[0].dead = True
    for _ in range(320 - 30):
        assert isinstance(world.call(here, 1, 1), Taken), "10 are leased by each of the others"
    assert here.quotas.standing(TENANT, world.now_ns)["rpm"].remaining == 30
    for _ in range(20):
        assert isinstance(world.call(here, 1, 1, patient=True), Taken), "two routers return theirs"
    world.run(2 * SILENT_MS / 1000, lambda *_: None)
    for _ in range(10):
        assert isinstance(world.call(here, 1, 1, patient=True), Taken), "the killed one is silent"
    assert isinstance(world.call(here, 1, 1, patient=True), Wait)
    assert world.most_in_a_minute() == 320


def test_a_lease_ends_early_if_the_last_exchange_asked_for_that_and_its_answer_was_lost() -> None:
    world = World(Limits(rpm=160), 2)
    world.run(1.5, lambda *_: None)
    here, there = world.nodes
    here.quotas.watch([TENANT], world.now_ns)
    world.answered(world.asked(here))
    here.dead = True  # it is cut off, and still gets calls
    world.run(SILENT_MS / 1000 + 0.1, lambda *_: None)
    for _ in range(160):
        assert isinstance(world.call(there, 1, 1), Taken)
    assert isinstance(here.quotas.take(TENANT, 1, 1, 1, world.now_ns), Wait)


@pytest.mark.parametrize("limits", [Limits(rpm=1), Limits(tpm=2), Limits(concurrent=1)])
def test_a_limit_of_one_admits_one_at_four_routers(limits: Limits) -> None:
    world = World(limits, 4)
    world.run(1.5, lambda *_: None)
    for _ in range(20):
        for node in world.nodes:
            world.call(node, 1, 1)
        world.pass_ms(100)
    assert len(world.admitted) == 1


def test_ten_thousand_idle_tenants_keep_their_leases_by_few_exchanges() -> None:
    names = [f"team-{number}" for number in range(10_000)]
    quotas = Quotas("router", START_MS)
    quotas.set_limits({name: Limits(rpm=100) for name in names})
    banks = {name: Bank() for name in names}
    now_ms = 0
    while now_ms < 60_000:
        asks = quotas.asks(now_ms * MS)
        assert len(asks) <= 100
        grants = {name: banks[name].exchange(ask, START_MS + now_ms) for name, ask in asks.items()}
        quotas.granted(grants, now_ms * MS)
        now_ms += EXCHANGE_NS // MS
    for name in names:
        assert isinstance(quotas.take(name, 1, 1, 1, now_ms * MS), Taken)


LIMIT = 60_000
PROMPT = 60
ANSWER = 40


def burst(rng: random.Random, where):
    """Bursts of calls every 0.3 s, of twice the limit; answers as expected."""

    def demand(world: World, tick: int) -> None:
        for node in world.nodes:
            while node.running and rng.random() < 0.5:
                world.end(node, ANSWER)
        if tick % 30 == 0:
            for _ in range(10):
                world.call(world.nodes[where(tick)], PROMPT, ANSWER)

    return demand


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(lambda _: 0, id="at one router"),
        pytest.param(lambda tick: tick // 30 % 4, id="at four routers"),
        pytest.param(lambda tick: tick // 1500 % 4, id="at one after the other"),
    ],
)
@pytest.mark.parametrize("limits", [Limits(tpm=LIMIT), Limits(rpm=LIMIT // (PROMPT + ANSWER))])
def test_four_routers_use_the_limit_and_never_more(where, limits) -> None:
    world = World(limits, 4)
    seconds = 620  # of which bursts may use 600: the window is of 31 slots of 2 s
    world.run(seconds, burst(random.Random(1), where))
    assert world.refused > len(world.admitted) // 2, "the demand is there"
    calls = LIMIT // (PROMPT + ANSWER)
    most = world.most_in_a_minute()
    assert most <= 1.01 * calls
    assert len(world.admitted) >= 0.95 * calls * seconds / 60
    print(f"{most / calls:.4f} {len(world.admitted) / calls / seconds * 60:.4f}")


def test_four_routers_spend_a_budget_to_its_end_and_never_more() -> None:
    world = World(Limits(budget=Budget(tokens=LIMIT)), 4)
    world.run(90, burst(random.Random(2), lambda tick: tick // 30 % 4))
    for node in world.nodes:
        while node.running:
            world.end(node, ANSWER)
    assert 0.99 * LIMIT <= sum(entry.net_tokens for entry in world.admitted) <= LIMIT


class Routers(RuleBasedStateMachine):
    """Calls, exchanges that are lost or late, kills, clock steps; in any order."""

    @initialize(
        rpm=st.none() | st.integers(1, 30),
        tpm=st.integers(20, 2000),
        concurrent=st.none() | st.integers(1, 8),
        count=st.integers(1, 4),
    )
    def begin(self, rpm, tpm, concurrent, count) -> None:
        self.limits = Limits(rpm=rpm, tpm=tpm, concurrent=concurrent)
        self.world = World(self.limits, count)
        self.late_asks: list = []
        self.late_grants: list = []

    def node(self, index: int):
        return self.world.nodes[index % len(self.world.nodes)]

    @rule(
        index=st.integers(0, 3),
        prompt=st.integers(1, 60),
        answer=st.integers(0, 100),
        times=st.integers(1, 6),
    )
    def call(self, index, prompt, answer, times) -> None:
        for _ in range(times):
            self.world.call(self.node(index), prompt, answer)

    @rule(index=st.integers(0, 3), part=st.floats(0, 1))
    def end(self, index, part) -> None:
        node = self.node(index)
        if node.running:
            reservation, prompt, _ = node.running[0]
            self.world.end(node, int(part * max(reservation.tokens - prompt, 0)))

    @rule(
        ms=st.integers(1, 190),
        times=st.integers(1, 8) | st.sampled_from([50, 290]),
        lost=st.integers(0, 6),
        step=st.just(0) | st.integers(-7_200_000, 900),
    )
    def wait(self, ms, times, lost, step) -> None:
        """Let time pass; of seven exchanges in a row, some are lost."""
        self.world.clock_ms += step
        for number in range(times):
            self.world.pass_ms(ms)
            for node in self.world.nodes:
                asks = self.world.asked(node)
                if number % 7 >= lost:
                    node.quotas.granted(self.world.answered(asks), self.world.now_ns)
                elif number % 2:
                    self.world.answered(asks)

    @rule(index=st.integers(0, 3))
    def exchange(self, index) -> None:
        self.world.exchange(self.node(index))

    @rule(index=st.integers(0, 3))
    def lose_ask(self, index) -> None:
        self.world.asked(self.node(index))

    @rule(index=st.integers(0, 3))
    def lose_grant(self, index) -> None:
        self.world.answered(self.world.asked(self.node(index)))

    @rule(index=st.integers(0, 3))
    def delay_ask(self, index) -> None:
        self.late_asks.append(self.world.asked(self.node(index)))

    @rule(index=st.integers(0, 3))
    def delay_grant(self, index) -> None:
        node = self.node(index)
        self.late_grants.append((node, self.world.answered(self.world.asked(node))))

    @rule()
    def deliver_late(self) -> None:
        for asks in self.late_asks:
            self.world.answered(asks)
        for node, grants in self.late_grants:
            node.quotas.granted(grants, self.world.now_ns)
        self.late_asks.clear()
        self.late_grants.clear()

    @rule(index=st.integers(0, 3))
    def kill(self, index) -> None:
        place = index % len(self.world.nodes)
        dead = self.world.nodes[place]
        dead.dead = True
        dead.running.clear()
        self.world.nodes[place] = self.world.born()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        recent = [
            entry
            for entry in world.admitted
            if not entry.node.dead and entry.at_ms > world.now_ms - 60_000
        ]
        running = sum(len(node.running) for node in world.nodes)
        assert running <= (self.limits.concurrent or running)
        assert len(recent) <= (self.limits.rpm or len(recent))
        assert sum(entry.net_tokens for entry in recent) <= self.limits.tpm


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("limits", [Limits(rpm=1000), Limits(tpd=10**9), Limits(concurrent=9)])
def test_limits_that_are_removed_and_set_again_hold_at_once(limits: Limits, count: int) -> None:
    """The banks remember the routers, so the number of an exchange must not begin again."""
    world = World(limits, count)
    for pause_s in (0.0, 70.0, 1.0):
        for _ in range(20):
            for node in world.nodes:
                assert isinstance(world.call(node, 1, 1, patient=True), Taken), pause_s
                world.end(node, 1)
        world.run(1.5, lambda *_: None)
        for node in world.nodes:
            node.quotas.set_limits({})
            assert node.quotas.take(TENANT, 1, 1, 1, world.now_ns) is None
        world.pass_ms(int(pause_s * 1000))
        for node in world.nodes:
            node.quotas.set_limits({TENANT: limits})


@pytest.mark.parametrize("meanwhile", [Limits(), Limits(concurrent=9)])
@pytest.mark.parametrize(
    ("limits", "kept_ms"),
    [
        (Limits(rpm=10), 0),
        (Limits(tpm=30), 5_000),
        (Limits(tpd=30), 3_600_000),
        (Limits(budget=Budget(tokens=30)), 20 * 3_600_000),
    ],
)
def test_use_counts_although_its_limit_was_removed_meanwhile(
    limits: Limits, kept_ms: int, meanwhile: Limits
) -> None:
    world = World(limits, 2)
    one, two = world.nodes
    for node in [one, one, one, one, one, two, two, two, two, two]:
        assert isinstance(world.call(node, 1, 2, patient=True), Taken)
        world.end(node, 2)
    for _ in range(3):
        world.run(1.5, lambda *_: None)
        for node in world.nodes:
            node.quotas.set_limits({TENANT: meanwhile})
        world.run(0.5, lambda *_: None)
        world.pass_ms(kept_ms)
        for node in world.nodes:
            node.quotas.set_limits({TENANT: limits})
    assert [isinstance(world.call(node, 1, 2), Wait) for node in world.nodes] == [True, True]
    for node in world.nodes:
        node.quotas.set_limits({})
        node.quotas.forget(TENANT)
        node.quotas.set_limits({TENANT: limits})
    world.bank = Bank()
    assert isinstance(world.call(one, 1, 2, patient=True), Taken), "of a new tenant of this name"


def test_a_call_that_runs_while_limits_are_removed_and_set_again_counts() -> None:
    world = World(Limits(concurrent=1), 1)
    (node,) = world.nodes
    assert isinstance(world.call(node, 1, 1), Taken)
    node.quotas.set_limits({})
    node.quotas.set_limits({TENANT: world.limits})
    assert isinstance(world.call(node, 1, 1), Wait)
    world.end(node, 1)
    assert isinstance(world.call(node, 1, 1, patient=True), Taken)


def test_an_answer_on_its_way_does_not_hide_the_use_of_a_limit_that_returns() -> None:
    world = World(Limits(tpd=30), 1)
    (node,) = world.nodes
    world.call(node, 10, 20)
    world.end(node, 20)
    world.exchange(node)
    node.quotas.set_limits({TENANT: Limits(rpm=100)})
    asks = world.asked(node)
    grants = world.answered(asks)
    node.quotas.set_limits({TENANT: Limits(rpm=100, tpd=30)})
    node.quotas.granted(grants, world.now_ns)
    assert isinstance(world.call(node, 1, 1), Wait)
