"""The planner of roles in the controller: what it observes, and what becomes of its decisions."""

from collections.abc import Mapping

import pytest

from baton.config.clients import SloConfig
from baton.planner.state import Decision, Figures, Nothing, Resize, RoleChange, WorkerState
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.router_demands import PlannedSizes, RouterDemand, WorkDemand
from fleet.pools.planning import NO_LIMITS, RolePlanning

FIGURES = Figures(
    prefill=1,
    decode=3,
    requests=20.0,
    requests_per_s=2.0,
    prompt_s=0.5,
    miss_share=1.0,
    output_tokens=20.0,
    prefill_need=1.5,
    decode_need=0.5,
    prefill_wait_s=1.0,
    decode_now=0.5,
)
SIZES = {"prefill": 1, "decode": 3}
RESIZE = Resize(prefill=2, decode=3, reason="the load needs 1.90 + 2.10 workers", figures=FIGURES)
TURN = RoleChange(worker_id="worker-1", role="prefill", reason="1 + 3 misses", figures=FIGURES)


class Planner:
    """Decides what it is told to, and notes what it observes."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)
        self.demands: list[Mapping[str, WorkDemand]] = []

    def observe(self, demands: Mapping[str, WorkDemand], workers: object, now_ns: int) -> None:
        self.demands.append(demands)

    def decide(self, now_ns: int, wanted: Mapping[str, int] | None = None) -> Decision:
        return self.decisions.pop(0)


class Demands:
    def __init__(self, *looks: dict[str, RouterDemand]) -> None:
        self.looks = list(looks)
        self.plans: list[PlannedSizes] = []

    async def read(self) -> dict[str, RouterDemand]:
        if not self.looks:
            raise RegistryUnavailableError("away")
        return self.looks.pop(0)

    async def report_plan(self, plan: PlannedSizes) -> None:
        self.plans.append(plan)


class Fleet:
    """A fleet with one ready worker, which keeps what the planner changes."""

    def __init__(self, refusal: str, sizes: Mapping[str, int]) -> None:
        self.refusal = refusal
        self.sizes = sizes
        self.turns: list[tuple[str, str]] = []
        self.resized: list[Mapping[str, int]] = []

    def workers(self) -> list[WorkerState]:
        return [WorkerState(worker_id="worker-1", role="decode", steps=100)]

    async def change_role(self, worker_id: str, role: str, _reason: str) -> str:
        self.turns.append((worker_id, role))
        return self.refusal

    async def resize(self, sizes: Mapping[str, int], _reason: str) -> str:
        self.resized.append(sizes)
        return self.refusal


def made(
    demands: Demands, refusal: str = "", sizes: Mapping[str, int] = SIZES
) -> tuple[RolePlanning, Fleet]:
    slo = SloConfig(ttft_s=2.0, itl_s=0.05)
    return RolePlanning(slo, demands), Fleet(refusal, sizes)


async def test_a_turn_is_made_only_in_auto() -> None:
    planning, fleet = made(Demands({}, {}))
    planner = Planner(TURN, TURN)
    await planning.plan(planner, fleet)
    assert fleet.turns == []
    planning.auto = True
    await planning.plan(planner, fleet)
    assert fleet.turns == [("worker-1", "prefill")]
    shown = planning.describe()
    assert [one["done"] for one in shown["decisions"]] == [True, False], "the newest first"
    assert shown["decisions"][0]["decision"]["figures"]["prefill_need"] == 1.5
    assert shown["mode"] == "auto"


async def test_a_turn_that_cannot_be_made_is_shown_with_the_reason() -> None:
    planning, fleet = made(Demands({}), "no prefill worker may be on 10.0.0.2")
    planning.auto = True
    await planning.plan(Planner(TURN), fleet)
    (shown,) = planning.describe()["decisions"]
    assert (shown["done"], shown["refused"]) == (False, "no prefill worker may be on 10.0.0.2")


async def test_a_router_that_reports_no_more_is_not_counted() -> None:
    gone, lives = RouterDemand(beat=5), RouterDemand(beat=6)
    planning, fleet = made(Demands({"a": gone, "b": gone}, {"a": gone, "b": lives}))
    planner = Planner(Nothing(reason="x"), Nothing(reason="x"))
    await planning.plan(planner, fleet)
    await planning.plan(planner, fleet)
    assert [sorted(demands) for demands in planner.demands] == [["a", "b"], ["b"]]


async def test_without_redis_nothing_is_decided() -> None:
    planning, fleet = made(Demands())
    planning.auto = True
    planner = Planner(TURN)
    await planning.plan(planner, fleet)
    assert (fleet.turns, planner.demands) == ([], [])


async def test_a_decision_that_only_repeats_the_last_with_other_figures_replaces_it() -> None:
    reasons = ["2 + 2 holds 0.51 + 0.20", "2 + 2 holds 0.52 + 0.21", "no load"]
    planning, fleet = made(Demands({}, {}, {}))
    planner = Planner(*(Nothing(reason=reason) for reason in reasons))
    for _ in reasons:
        await planning.plan(planner, fleet)
    found = [one["decision"]["reason"] for one in planning.describe()["decisions"]]
    assert found == ["no load", "2 + 2 holds 0.52 + 0.21"]


async def test_sizes_are_changed_only_in_auto_or_from_zero() -> None:
    planning, fleet = made(Demands({}, {}))
    await planning.plan(Planner(RESIZE), fleet)
    assert fleet.resized == []
    planning.auto = True
    await planning.plan(Planner(RESIZE), fleet)
    assert fleet.resized == [{"prefill": 2, "decode": 3}]

    planning, fleet = made(Demands({}), sizes={"prefill": 0, "decode": 0})
    await planning.plan(Planner(RESIZE), fleet)
    assert fleet.resized == [{"prefill": 2, "decode": 3}], (
        "requests wait: `hold` does not keep them"
    )


async def test_the_routers_get_the_sizes_that_it_wants_also_in_hold() -> None:
    """Needs of 1.5 + 0.5 workers: the best split of four workers is 3 + 1."""
    demands = Demands({}, {}, {}, {})
    planning, fleet = made(demands)
    quiet = Nothing(reason="no load")
    held = Nothing(reason="1 + 3 misses, but prompts wait now", figures=FIGURES)
    planner = Planner(TURN, RESIZE, held, quiet)
    for _ in range(4):
        await planning.plan(planner, fleet)
    assert (fleet.turns, fleet.resized) == ([], [])
    assert demands.plans == [
        PlannedSizes(prefill=2, decode=2, load=0.5),
        PlannedSizes(prefill=2, decode=3, load=0.5),
        PlannedSizes(prefill=1, decode=3, load=0.5),
        PlannedSizes(prefill=1, decode=3, load=0.0),
    ]


@pytest.mark.timeout(5)
async def test_without_limits_there_is_nothing_to_plan_for() -> None:
    planning = RolePlanning(None, Demands())
    await planning.run(Fleet("", SIZES))
    assert not planning.possible
    assert planning.describe()["reason"] == NO_LIMITS


async def test_a_model_that_is_asleep_is_not_started_by_requests() -> None:
    demands = Demands({}, {})
    planning, fleet = made(demands, sizes={"prefill": 0, "decode": 0})
    planning.auto = True
    planning.asleep = "wait"
    await planning.plan(Planner(RESIZE), fleet)
    assert fleet.resized == []
    planning.asleep = ""
    await planning.plan(Planner(RESIZE), fleet)
    assert fleet.resized == [{"prefill": 2, "decode": 3}]
    assert [plan.asleep for plan in demands.plans] == ["wait", ""], "routers are told"
