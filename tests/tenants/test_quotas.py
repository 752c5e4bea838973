"""The script of `SharedQuotas` on a real Redis, against the pure bank."""

import random
import time

from baton.tenants.bank import Ask, Grant, Need
from baton.tenants.limits import Limits
from baton.tenants.quotas import SharedQuotas
from router.tenants.lease import own_part
from router.tenants.quota import EXCHANGE_NS, Quotas
from router.tenants.quota import QuotaReservation as Taken
from tests.tenants.bank import Bank

START_MS = 1_790_000_000_000
KINDS = {"tpm": (1000, 61, 500), "tpd": (86_400_000, 1, 3000), "concurrent": (1, 0, 9)}


def some_need(rng: random.Random, kind: str, now_ms: int) -> Need:
    slot_ms, slots, limit = KINDS[kind]
    spent = rng.randrange(200)
    slot = now_ms // slot_ms if slots else 0
    used = {str(max(slot - rng.randrange(70), 0) if slots else 0): rng.randrange(-20, 80)}
    return Need(
        limit=limit,
        slot_ms=slot_ms,
        slots=slots,
        spent_total=spent,
        ceiling=spent + rng.randrange(300),
        used=used if rng.random() < 0.7 else {},
    )


def some_ask(rng: random.Random, sequence: int, now_ms: int) -> Ask:
    kinds = rng.sample(sorted(KINDS), rng.randrange(4))
    return Ask(
        router=f"router-{rng.randrange(3)}",
        sequence=max(sequence - rng.choice([0, 0, 0, 7]), 1),
        elapsed_ms=rng.choice([0, 200, 3000, 100_000]),
        whole=rng.random() < 0.3,
        silent_ms=rng.choice([2000, 2000, 30_000]),
        needs={kind: some_need(rng, kind, now_ms) for kind in kinds},
    )


async def test_the_script_computes_what_the_bank_computes(registry) -> None:
    shared = SharedQuotas(registry)
    granted = refused = unknown = elsewhere = 0
    for seed in range(40):
        rng = random.Random(seed)
        bank = Bank()
        clock_ms = START_MS
        for sequence in range(1, 60):
            clock_ms += rng.choice([0, 1, 200, 900, 2500, 70_000, -3_600_000, 3_600_000])
            ask = some_ask(rng, sequence, clock_ms)
            expected = bank.exchange(ask, clock_ms)
            found = (await shared.exchange({f"team-{seed}": ask}, clock_ms))[f"team-{seed}"]
            assert found == expected, (seed, sequence, ask)
            granted += any(p.ceiling > ask.needs[k].spent_total for k, p in found.parts.items())
            refused += any(p.wait_ms for p in found.parts.values())
            unknown += found.unknown
            elsewhere += any(p.elsewhere and p.wait_ms for p in found.parts.values())
    assert granted > 200 and refused > 200 and unknown > 50, "all outcomes occurred"
    assert elsewhere > 50


def test_a_router_alone_has_what_a_bank_without_other_routers_grants() -> None:
    granted = refused = 0
    for seed in range(500):
        rng = random.Random(seed)
        kind = rng.choice(sorted(KINDS))
        need = some_need(rng, kind, START_MS)
        slot = START_MS // need.slot_ms if need.slots else 0
        ages = range(need.slots) if need.slots else (0,)
        used = {slot - rng.choice(ages): rng.randrange(-20, 400) for _ in range(rng.randrange(4))}
        need.used = {str(at): amount for at, amount in used.items()}
        ask = Ask(router="a", sequence=1, elapsed_ms=0, whole=True, needs={kind: need})
        part = own_part(need, used, START_MS)
        assert part == Bank().exchange(ask, START_MS).parts[kind], (seed, need)
        granted += part.ceiling > need.spent_total
        refused += part.wait_ms > 0
    assert granted > 100 and refused > 100, "both outcomes occurred"


async def test_exchanges_go_by_redis_clock_and_tenants_are_apart(registry) -> None:
    shared = SharedQuotas(registry)
    need = Need(limit=10, slot_ms=1000, slots=61, spent_total=0, ceiling=8, used={})
    ask = Ask(router="a", sequence=1, elapsed_ms=0, whole=True, needs={"rpm": need})
    other = Ask(router="b", sequence=1, elapsed_ms=0, whole=True, needs={"rpm": need})
    found = await shared.exchange({"one": ask, "two": ask})
    assert [grant.parts["rpm"].ceiling for grant in found.values()] == [8, 8]
    assert abs(found["one"].now_ms - time.time() * 1000) < 5000
    again = await shared.exchange({"one": other})
    assert again["one"].parts["rpm"].ceiling == 2
    assert isinstance(again["one"], Grant)


def ask_of(sequence: int, used: dict[str, int], ceiling: int = 0, **more) -> Ask:
    need = Need(limit=10, slot_ms=1000, slots=61, spent_total=0, ceiling=ceiling, used=used)
    ask = {"router": "a", "elapsed_ms": 200, "whole": sequence == 1} | more
    return Ask(sequence=sequence, needs={"rpm": need}, **ask)


def test_a_late_report_does_not_replace_a_newer_one() -> None:
    bank = Bank()
    slot = str(START_MS // 1000)
    bank.exchange(ask_of(1, {}), START_MS)
    assert bank.exchange(ask_of(3, {slot: 9}), START_MS).parts["rpm"].left == 1
    assert bank.exchange(ask_of(2, {slot: 4}), START_MS).parts == {}
    assert bank.exchange(ask_of(4, {}), START_MS).parts["rpm"].left == 1


def test_a_step_of_the_clock_neither_frees_nor_blocks() -> None:
    for step_ms in (-3_600_000, 3_600_000):
        bank = Bank()
        bank.exchange(ask_of(1, {str(START_MS // 1000): 9}), START_MS)
        found = bank.exchange(ask_of(2, {}), START_MS + step_ms)
        assert found.parts["rpm"].left == 1, "nothing is forgotten early"
        for number in range(3, 400):
            found = bank.exchange(ask_of(number, {}), START_MS + step_ms + 200 * (number - 2))
        assert found.parts["rpm"].left == 10, "and everything in time"


async def test_limits_that_are_removed_and_set_again_hold_at_once_in_redis(registry) -> None:
    shared = SharedQuotas(registry)
    day = {"team": Limits(tpd=100)}
    routers = [Quotas(f"router-{number}", START_MS) for number in range(2)]
    now_ns = 10**9
    for _ in range(3):
        for quotas in routers:
            quotas.set_limits(day)
        for quotas in routers:
            for _ in range(10):
                now_ns += EXCHANGE_NS
                found = quotas.take("team", 1, 1, 0, now_ns)
                asks = quotas.asks(now_ns)
                grants = await shared.exchange(asks, START_MS + now_ns // 10**6)
                quotas.granted(grants, now_ns)
                if not isinstance(found, Taken):
                    found = quotas.take("team", 1, 1, 0, now_ns)
                assert isinstance(found, Taken)
                quotas.settle(found, 1, 0, now_ns)
        for quotas in routers:
            quotas.set_limits({})
        now_ns += 60 * 10**9
    left = routers[0]
    left.set_limits(day)
    grants = await shared.exchange(left.asks(now_ns), START_MS + now_ns // 10**6)
    left.granted(grants, now_ns)
    assert left.standing("team", now_ns)["tpd"].used in (59, 60), "the last may not be reported"
    await shared.forget("team")
    assert await registry.send(("EXISTS", registry.key("quotas", "team"))) == [0]
