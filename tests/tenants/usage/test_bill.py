"""Costs of usage: all lines together cost what the workers cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.registry.redis_store import Registry
from baton.telemetry.metrics import Metrics
from baton.tenants.usage import worker_time
from baton.tenants.usage.bill import IDLE, Prices, bill, worker_seconds
from baton.tenants.usage.ledger import WORKERS, Counters, RowName
from baton.tenants.usage.shared import HourUsage, SharedUsage

HOUR = 500_000
S = 10**9


def hour_of(hour: int, price: float | None, **rows: Counters) -> HourUsage:
    names = {"prefill": (WORKERS, "", "prefill"), "decode": (WORKERS, "", "decode")}
    named = {names.get(tenant, (tenant, "key", "model")): its for tenant, its in rows.items()}
    return HourUsage(hour, price, {RowName(hour, *name): its for name, its in named.items()})


HOURS = [
    hour_of(
        HOUR,
        36.0,  # 0.01 a second
        team=Counters(
            requests=2,
            input_tokens=1000,
            cached_tokens=600,
            output_tokens=50,
            input_ns=4 * S,
            output_ns=10 * S,
        ),
        free=Counters(requests=1, input_tokens=10, input_ns=S),
        prefill=Counters(worker_ns=3600 * S),
        decode=Counters(worker_ns=7200 * S),
    ),
    hour_of(HOUR + 1, None, free=Counters(input_ns=S), prefill=Counters(worker_ns=5 * S)),
]


def test_a_line_has_the_costs_of_its_tokens() -> None:
    free, team, idle = bill(HOURS, ["tenant"], price_per_hour=72.0)
    assert (free.tenant, free.requests, free.worker_s) == ("free", 1, 2.0)
    assert free.cost == pytest.approx(0.01 + 0.02), "the second hour has no price of its own"
    assert (team.tenant, team.key, team.model, team.hour) == ("team", None, None, None)
    assert team.cost == pytest.approx(0.14)
    assert team.cost_per_1000_input == pytest.approx(0.04)
    assert team.cost_per_1000_computed == pytest.approx(0.1)
    assert team.cost_per_1000_output == pytest.approx(2.0)
    assert free.cost_per_1000_output is None
    assert (idle.tenant, idle.worker_s) == (IDLE, 10_800 - 15 + 5 - 1)
    assert worker_seconds(HOURS) == {"decode": 7200.0, "prefill": 3605.0}


def test_lines_by_hour_and_of_one_tenant() -> None:
    lines = bill(HOURS, ["hour", "tenant", "key"], 0.0)
    assert [(line.hour, line.tenant, line.key) for line in lines] == [
        (HOUR * 3600, "free", "key"),
        (HOUR * 3600, "team", "key"),
        (HOUR * 3600, IDLE, None),
        (HOUR * 3600 + 3600, "free", "key"),
        (HOUR * 3600 + 3600, IDLE, None),
    ]
    (only,) = bill(HOURS, ["tenant"], 0.0, tenant="team")
    assert only.tenant == "team", "the idle time is no business of a tenant"


PARTS = st.builds(Counters, input_ns=st.integers(0, 10**15), output_ns=st.integers(0, 10**15))
USED = st.dictionaries(st.sampled_from(["a", "b", "c"]), PARTS)


@given(
    hours=st.lists(
        st.tuples(USED, st.integers(0, 10**16), st.floats(0.0, 1000.0)), min_size=1, max_size=5
    ),
    by=st.sets(st.sampled_from(["hour", "tenant", "key", "model"])),
)
def test_all_lines_cost_what_the_workers_cost(hours, by) -> None:
    usage = [
        hour_of(HOUR + place, price, decode=Counters(worker_ns=worker_ns), **used)
        for place, (used, worker_ns, price) in enumerate(hours)
    ]
    cost = sum(worker_ns / 3.6e12 * price for _, worker_ns, price in hours)
    charged = sum(c.charged_ns for used, _, _ in hours for c in used.values()) / 3.6e9
    lines = bill(usage, by, 0.0)
    slack = charged * 1e-6 + 1e-290  # a price near the smallest float has few digits
    assert sum(line.cost for line in lines) == pytest.approx(cost, rel=1e-6, abs=slack)


async def test_a_worker_counts_its_time_for_the_role_that_it_has(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(worker_time.time, "monotonic_ns", lambda: int(now_s * 1e9))
    monkeypatch.setattr(worker_time.time, "time", lambda: HOUR * 3600.0)
    clock = worker_time.WorkerTime("prefill", registry, Metrics("worker"), lambda _: None, "lane")
    now_s += 100.5
    clock.change_role("decode")
    now_s += 7.25
    await clock.close()
    found = await SharedUsage(registry).read([HOUR])
    assert worker_seconds(found) == {"decode": 7.25, "prefill": 100.5}
    assert {name.key for name in found[0].rows} == {"lane"}


def test_each_model_is_billed_at_the_price_of_its_own_workers() -> None:
    rows = {
        RowName(HOUR, "team", "key", "small"): Counters(requests=1, output_tokens=10, output_ns=S),
        RowName(HOUR, "team", "key", "large"): Counters(requests=1, output_tokens=10, output_ns=S),
        RowName(HOUR, WORKERS, "small", "decode"): Counters(worker_ns=10 * S),
        RowName(HOUR, WORKERS, "large-v1", "decode"): Counters(worker_ns=10 * S),
    }
    prices = Prices(
        lanes={"small": 36.0, "large-v1": 360.0}, models={"small": 36.0, "large": 360.0}
    )
    large, small, idle = bill([HourUsage(HOUR, 7.0, rows)], ["model"], 9.0, prices=prices)
    assert (small.model, small.cost) == ("small", pytest.approx(0.01))
    assert (large.model, large.cost) == ("large", pytest.approx(0.1))
    assert idle.worker_s == 18
    assert idle.cost == pytest.approx(9 * 0.01 + 9 * 0.1)
    assert small.cost + large.cost + idle.cost == pytest.approx(10 * 0.01 + 10 * 0.1)
