"""How the runner comes to the load of an overload, with a fleet that exists in this file only."""

import pytest

from loadtest.client.records import ServerOptions
from loadtest.commands.options import LocalFleet
from loadtest.drill import runner
from loadtest.drill.fleet import DrillError
from loadtest.drill.phases import PhaseFigures
from tests.loadtest.drill import test_overload as overload
from tests.loadtest.drill.test_verdict import GOLDEN, ended, worker


class View:
    """A fleet of two workers at rest."""

    limits: tuple[float, float] | None = None

    def __init__(self, *_: object) -> None:
        self._workers = [worker(), worker(id="decode-1")]

    async def __aenter__(self) -> "View":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def workers(self):
        return self._workers

    async def slo(self):
        return self.limits

    async def wait(self, condition, limit_s: float):
        assert condition(self._workers)
        return self._workers


@pytest.fixture
def run(monkeypatch):
    """Run the drill in a fleet with these limits that has this goodput."""

    async def go(slo, capacity: float, holds: float | None = None, **load: float):
        tried: list[float] = []

        async def alone(_: ServerOptions) -> float:
            return 0.5

        async def measured(rate, seconds, server, limits) -> PhaseFigures:
            assert (limits.ttft_s, limits.itl_s, limits.own_s) == (2.0, 0.05, 0.5)
            tried.append(rate)
            good = round(min(rate, capacity) * seconds)
            fields = {"refused": 0, "late": 0, "failed": 0, "sent": round(rate * seconds)}
            return PhaseFigures(name="", rate=rate, seconds=seconds, good=good, **fields)

        async def sent(phases, server):
            assert phases == overload.PHASES
            return overload.load(**load)

        async def probed(self, answers) -> None:
            answers.planned = [0, 1]
            answers.records = [ended(0), ended(1)]

        async def otherwise(self, drill, scene):
            raise LookupError("a drill without limits")

        monkeypatch.setattr(View, "limits", slo)
        monkeypatch.setattr(runner, "FleetView", View)
        monkeypatch.setattr(runner, "alone_s", alone)
        monkeypatch.setattr(runner, "goodput", measured)
        monkeypatch.setattr(runner, "send_phases", sent)
        monkeypatch.setattr(runner.DrillRunner, "_probe_until_answered", probed)
        monkeypatch.setattr(runner.DrillRunner, "_load_and_fault", otherwise)
        local = LocalFleet("f", "http://f", "", lambda: None, lambda verb, arguments: "")
        server = ServerOptions(url="http://f", model="m")
        options = runner.DrillOptions(server=server, local=local, holds=holds)
        made = runner.DrillRunner(options)
        made._golden = [GOLDEN[0], GOLDEN[1]]
        return await made.run("overload"), tried

    return go


async def test_the_rate_is_searched_from_more_than_the_workers_compute(run):
    verdict, tried = await run((2.0, 0.05), 2.0)
    assert tried == [4.0, 2.0], "two workers, 0.5 s for a prompt; then what was good"
    assert verdict.passed, verdict.faults
    assert [phase.rate for phase in verdict.phases] == [2.0, 3.0, 6.0, 2.0]
    assert verdict.compared == 2


async def test_a_rate_that_is_given_is_not_searched(run):
    verdict, tried = await run((2.0, 0.05), 9.0, holds=2.0)
    assert tried == []
    assert verdict.passed


async def test_a_rate_that_is_not_held_is_no_verdict(run):
    with pytest.raises(DrillError, match=r"does not hold 2.00 requests/s: only 75 % were good"):
        await run((2.0, 0.05), 9.0, holds=2.0, **{"1.0 x": 1.5})


async def test_a_fleet_that_serves_nothing_holds_no_rate(run):
    with pytest.raises(DrillError, match="holds no tried rate: set --holds"):
        await run((2.0, 0.05), 0.0)


async def test_a_fleet_without_limits_has_the_drill_of_bounded_queues(run):
    with pytest.raises(LookupError, match="without limits"):
        await run(None, 2.0)
