"""Usage of several processes in a real Redis: counted once, whatever is lost or repeated."""

import asyncio
import copy

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.registry.redis_store import Registry
from baton.tenants.usage.ledger import (
    KEPT_HOURS,
    MAX_REPORTED_ROWS,
    MAX_ROWS_PER_HOUR,
    OTHERS,
    Counters,
    Ledger,
    RowName,
    UsageReport,
)
from baton.tenants.usage.shared import KEPT_DAYS, SharedUsage
from fleet.local.redis_server import EmbeddedRedis
from tests.soak import examples

HOUR = 500_000
TEAM = RowName(HOUR, "team", "key", "model")
TENANTS = ("team", "free", "other")


async def send(shared: SharedUsage, ledger: Ledger, hour: int = HOUR) -> bool:
    report = ledger.report(hour)
    return report is not None and ledger.answered(report, await shared.apply(report))


async def of_hour(shared: SharedUsage, hour: int = HOUR) -> dict[RowName, Counters]:
    (found,) = await shared.read([hour])
    return found.rows


async def test_rows_of_two_lives_are_added_up(registry) -> None:
    shared = SharedUsage(registry)
    for life in ("one", "two"):
        ledger = Ledger(life)
        row = ledger.row(TEAM)
        row.requests += 1
        row.output_tokens += 7
        row.refusals["rate_limit"] = 2
        await send(shared, ledger)
        ledger.row(TEAM).requests += 1
        await send(shared, ledger)
        assert ledger.report(HOUR) is None, "nothing has changed"
    expected = Counters(requests=4, output_tokens=14, refusals={"rate_limit": 4})
    assert await of_hour(shared) == {TEAM: expected}
    assert await of_hour(shared, HOUR + 1) == {}


async def test_the_price_of_an_hour_is_kept_and_rows_expire(registry) -> None:
    shared = SharedUsage(registry)
    ledger = Ledger("one")
    ledger.row(TEAM).requests += 1
    await shared.apply(ledger.report(HOUR), 2.5)
    other = Ledger("worker")
    other.row(TEAM).requests += 1
    await shared.apply(other.report(HOUR))
    (found,) = await shared.read([HOUR])
    assert found.price_per_hour == 2.5
    (left_ms,) = await registry.send(("PTTL", registry.key("usage:hours", str(HOUR))))
    assert 0 <= KEPT_DAYS * 24 * 3600 * 1000 - left_ms < 60_000


async def test_a_large_ledger_is_reported_in_parts(registry) -> None:
    shared = SharedUsage(registry)
    ledger = Ledger("one")
    count = MAX_REPORTED_ROWS + 10
    for number in range(count):
        ledger.row(TEAM._replace(key=str(number))).requests += 1
    assert await send(shared, ledger), "more is due"
    assert not await send(shared, ledger)
    assert len(await of_hour(shared)) == count


async def test_a_damaged_row_is_left_out(registry) -> None:
    shared = SharedUsage(registry)
    ledger = Ledger("one")
    ledger.row(TEAM).requests += 1
    await send(shared, ledger)
    key = registry.key("usage:hours", str(HOUR))
    await registry.send(("HSET", key, b"\xff", b"[1]"), ("HSET", key, b'["l","t","k","m"]', b"x"))
    assert await of_hour(shared) == {TEAM: Counters(requests=1)}


def test_a_change_during_a_report_is_reported_again() -> None:
    ledger = Ledger("one")
    ledger.row(TEAM).requests += 1
    report = ledger.report(HOUR)
    ledger.row(TEAM).requests += 1
    ledger.answered(report, 0)
    assert ledger.report(HOUR).rows[TEAM].requests == 2


def test_old_rows_are_forgotten_once_they_are_reported() -> None:
    ledger = Ledger("one")
    ledger.row(TEAM).requests += 1
    assert TEAM in ledger.report(HOUR + KEPT_HOURS + 1).rows, "Redis does not have it"
    ledger.answered(ledger.report(HOUR), 0)
    assert ledger.report(HOUR + KEPT_HOURS + 1) is None
    ledger.row(TEAM).requests += 1
    assert ledger.report(HOUR).rows[TEAM].requests == 1, "it is a new row"


def test_the_rows_of_an_hour_are_bounded() -> None:
    ledger = Ledger("one")
    for number in range(MAX_ROWS_PER_HOUR + 5):
        ledger.row(TEAM._replace(tenant=f"t{number}")).requests += 1
    assert ledger.unreported_rows == MAX_ROWS_PER_HOUR + 1
    assert ledger.row(TEAM._replace(tenant=OTHERS, key="")).requests == 5
    ledger.row(TEAM._replace(hour=HOUR + 1)).requests += 1
    assert ledger.unreported_rows == MAX_ROWS_PER_HOUR + 2


USE = ("use", 0, "team", 0)
OTHER = ("use", 0, "free", 0)
OK = ("send", 0, "ok")
LOST = ("send", 0, "lost")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 1), st.sampled_from(TENANTS), st.integers(0, 2)),
        st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from(["ok", "lost", "reply"])),
        st.tuples(st.just("late"), st.integers(0, 1)),
        st.tuples(st.just("save")),
        st.tuples(st.just("restore")),
        st.tuples(st.just("empty")),
    ),
    max_size=60,
)


class World:
    """Two ledgers, one Redis, and what was used."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.shared = SharedUsage(registry)
        self.ledgers = [Ledger("one"), Ledger("two")]
        self.used: dict[RowName, Counters] = {}
        self.under_way: list[list[UsageReport]] = [[], []]
        self.saved: list[tuple[bytes, bytes]] = []

    async def run(self, steps) -> None:
        await self.registry.send(("FLUSHALL",))
        for verb, *arguments in steps:
            await getattr(self, verb)(*arguments)
        for ledger in self.ledgers:
            report = ledger.report(HOUR + 2, always=True)
            while report and ledger.answered(report, await self.shared.apply(report)):
                report = ledger.report(HOUR + 2)

    async def use(self, who: int, tenant: str, hour: int) -> None:
        name = TEAM._replace(tenant=tenant, hour=HOUR + hour)
        for row in (self.ledgers[who].row(name), self.used.setdefault(name, Counters())):
            row.requests += 1
            row.output_tokens += 3
            row.refusals["busy"] = row.refusals.get("busy", 0) + 1

    async def send(self, who: int, what: str) -> None:
        """Send a report: it arrives, or is lost on its way (and may come late), or its reply is."""
        ledger = self.ledgers[who]
        report = ledger.report(HOUR + 2)
        if report is None:
            return
        if what == "lost":
            self.under_way[who].append(report._replace(rows=copy.deepcopy(report.rows)))
            return
        known = await self.shared.apply(report)
        if what == "ok":
            ledger.answered(report, known)

    async def late(self, who: int) -> None:
        """A lost report arrives after others."""
        if self.under_way[who]:
            await self.shared.apply(self.under_way[who].pop())

    async def save(self) -> None:
        (keys,) = await self.registry.send(("KEYS", "*"))
        dumps = await self.registry.send(*(("DUMP", key) for key in keys)) if keys else []
        self.saved = list(zip(keys, dumps, strict=True))

    async def restore(self) -> None:
        """Redis restarts with an older state."""
        calls = [("RESTORE", key, 0, dump) for key, dump in self.saved]
        await self.registry.send(("FLUSHALL",), *calls)

    async def empty(self) -> None:
        await self.registry.send(("FLUSHALL",))


def test_usage_is_counted_once_whatever_is_lost(redis_server: EmbeddedRedis) -> None:
    with asyncio.Runner() as runner:
        registry = Registry(redis_server.url, "test")

        @example(steps=[USE, LOST, USE, OK, ("late", 0)])
        @example(steps=[USE, OK, ("empty",), OTHER, ("send", 0, "reply"), OTHER, OK])
        @settings(max_examples=examples(150), deadline=None)
        @given(steps=STEPS)
        def check(steps) -> None:
            world = World(registry)
            runner.run(world.run(steps))
            found = {}
            for hour in runner.run(world.shared.read(range(HOUR, HOUR + 3))):
                found |= hour.rows
            assert found == world.used

        check()
        runner.run(registry.close())


async def test_a_late_report_does_not_replace_newer_rows(registry) -> None:
    shared = SharedUsage(registry)
    ledger = Ledger("one")
    ledger.row(TEAM).requests += 1
    late = copy.deepcopy(ledger.report(HOUR))
    ledger.row(TEAM).requests += 1
    await send(shared, ledger)
    assert await shared.apply(late) == 2
    assert await of_hour(shared) == {TEAM: Counters(requests=2)}
