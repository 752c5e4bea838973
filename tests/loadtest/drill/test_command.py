"""`baton loadtest drill overload` as it is typed, with a runner that returns made-up verdicts."""

import json

import pytest
from typer.testing import CliRunner, Result

from loadtest.cli import app
from loadtest.commands import drill
from loadtest.commands.options import LocalFleet
from loadtest.drill.fleet import DrillError
from loadtest.drill.overload import judge_overload
from loadtest.drill.runner import DrillOptions
from loadtest.drill.verdict import DrillRun
from tests.loadtest.drill import test_overload as overload
from tests.loadtest.drill.test_verdict import GOLDEN, ended, worker
from tests.loadtest.tiny_server import tiny_server


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Type the command for a fleet with this goodput at 3 times the load."""

    def run(good_per_s: float) -> tuple[Result, list[DrillOptions]]:
        taken: list[DrillOptions] = []

        class Runner:
            def __init__(self, options: DrillOptions) -> None:
                taken.append(options)

            async def check(self, names: list[str]) -> None: ...

            async def take_golden_answers(self) -> None: ...

            async def run(self, name: str):
                assert name == "overload"
                return judge_overload(
                    DrillRun(
                        planned=list(range(overload.PLAN.request_count)),
                        records=overload.load(**{"3 x": good_per_s}),
                    ),
                    overload.PHASES,
                    overload.LIMITS,
                    probes=[ended(0), ended(1)],
                    golden=GOLDEN,
                    workers=[worker()],
                )

        monkeypatch.setattr(drill, "DrillRunner", Runner)
        with tiny_server() as server:
            local = LocalFleet("f", server.url, "", lambda: None, lambda verb, arguments: "")
            line = ["drill", "overload", "--holds", "2.5", "--out", str(tmp_path)]
            result = CliRunner().invoke(app, line, obj=lambda: local, env={"COLUMNS": "200"})
        return result, taken

    return run


def test_an_overload_that_is_held(typed, tmp_path):
    result, (options,) = typed(2.0)
    assert result.exit_code == 0, result.output
    assert options.holds == 2.5
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in result.output.splitlines()]
    assert ["3 x", "6.00", "2.00", "180", "120", "0", "0", "100.0 %"] in rows
    assert '"refused": 120' in (tmp_path / "drill.json").read_text()
    assert '"interrupted": false' in (tmp_path / "drill.json").read_text()


def test_an_overload_that_is_not_held_fails_and_says_why(typed):
    result, _ = typed(1.0)
    assert result.exit_code == 1
    assert "overload: 3 x: 1.00 good responses/s are 0.50 of those at 1.0 x" in result.output


def test_ctrl_c_keeps_the_drills_that_have_ended(monkeypatch, tmp_path):
    class Runner:
        def __init__(self, options: DrillOptions) -> None: ...

        async def check(self, names: list[str]) -> None: ...

        async def take_golden_answers(self) -> None: ...

        async def run(self, name: str):
            if name != "overload":
                raise KeyboardInterrupt
            return judge_overload(
                DrillRun(
                    planned=list(range(overload.PLAN.request_count)),
                    records=overload.load(**{"3 x": 2.0}),
                ),
                overload.PHASES,
                overload.LIMITS,
                probes=[ended(0), ended(1)],
                golden=GOLDEN,
                workers=[worker()],
            )

    monkeypatch.setattr(drill, "DrillRunner", Runner)
    with tiny_server() as server:
        local = LocalFleet("f", server.url, "", lambda: None, lambda verb, arguments: "")
        line = ["drill", "overload", "kill-prefill", "--out", str(tmp_path)]
        result = CliRunner().invoke(app, line, obj=lambda: local, env={"COLUMNS": "200"})
    assert result.exit_code == 130
    assert "1 of 2, overload" in result.output
    assert "PARTIAL: interrupted, 1 of 2 drills have ended" in result.output
    written = json.loads((tmp_path / "drill.json").read_text())
    assert written["interrupted"] is True
    assert written["asked"] == ["overload", "kill-prefill"]
    assert [one["drill"] for one in written["drills"]] == ["overload"]


def test_a_run_without_a_verdict_leaves_its_folder_to_the_next_one(monkeypatch, tmp_path):
    class Runner:
        def __init__(self, options: DrillOptions) -> None: ...

        async def check(self, names: list[str]) -> None: ...

        async def take_golden_answers(self) -> None:
            raise DrillError("golden response: error 503")

    monkeypatch.setattr(drill, "DrillRunner", Runner)
    with tiny_server() as server:
        local = LocalFleet("f", server.url, "", lambda: None, lambda verb, arguments: "")
        line = ["drill", "overload", "--out", str(tmp_path)]
        for _ in range(2):
            result = CliRunner().invoke(app, line, obj=lambda: local, env={"COLUMNS": "200"})
            assert result.exit_code == 1
            assert "golden response: error 503" in result.output
    assert not (tmp_path / "drill.json").exists()


def test_a_fleet_without_a_damaged_model_is_refused_before_any_request(monkeypatch, tmp_path):
    async def models(self) -> dict[str, list[dict[str, str]]]:
        return {"models": [{"name": "m"}]}

    monkeypatch.setattr("loadtest.drill.runner.FleetView.models", models)
    with tiny_server() as server:
        local = LocalFleet("f", server.url, "", lambda: None, lambda verb, arguments: "")
        line = ["drill", "kill-prefill", "bad-canary", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, line, obj=lambda: local, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "serves no model NAME with a damaged copy NAME-damaged" in result.output
    assert "golden responses" not in result.output
    assert not (tmp_path / "out").exists()
