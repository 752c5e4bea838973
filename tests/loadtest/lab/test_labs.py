"""`baton lab` as it is typed: on a tiny model always, on SmolLM2 and a fleet in the slow tests."""

import json
import re
import time
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from loadtest.lab import driver, places
from loadtest.lab.cli import lab
from loadtest.lab.report import report
from loadtest.lab.results import Findings, LabResults, Plot, Series, shown
from loadtest.lab.table import LABS, LabContext
from tests.matrix.tiny import write_tiny

app = typer.Typer()
app.command()(lab)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference of a model of no size."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


def left_in(folder: Path, name: str) -> LabResults:
    """What a run has left, checked as far as it is the same for all."""
    results = msgspec.json.decode((folder / "results.json").read_bytes(), type=LabResults)
    assert (results.lab, results.quick) == (name, True)
    findings = results.findings
    assert findings.rows
    assert {len(row) for row in findings.rows} == {len(findings.columns)}
    assert findings.plots
    for plot in findings.plots:
        assert {len(line.y) for line in plot.series} == {len(plot.x)}
    page = (folder / "report.html").read_text()
    assert f"<title>Lab: {name}" in page
    assert results.machine in page
    assert "src=" not in page
    assert json.loads(re.findall(r'type="application/json">(.*?)</script>', page, re.DOTALL)[0])
    return results


def test_without_a_name_they_are_listed() -> None:
    told = run().output
    for name in LABS:
        assert name in told
    assert (
        "unknown lab 'nonsense'; use one of chunks, speculation" in run("nonsense", code=1).stderr
    )


def test_a_lab_leaves_results_and_a_report_and_says_what_it_found(
    tiny: str, tmp_path: Path
) -> None:
    told = run("chunks", "--quick", "--model", tiny, "--threads", 1, "--out", tmp_path)
    assert told.stderr.startswith("starting an engine with ")
    found = left_in(tmp_path, "chunks").findings
    assert found.sentence in " ".join(told.output.split())


def test_a_lab_shows_what_it_waits_for_before_its_first_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing torch and loading a model take seconds, and a fleet takes longer."""
    monkeypatch.setattr("baton.telemetry.progress._SILENT_S", 0.05)
    monkeypatch.setattr(driver, "LLM", lambda *_, **__: time.sleep(0.2))
    driver.engine(LabContext(model="a [model]"))
    assert "waiting for the model a [model]\n" in capsys.readouterr().err
    output = tmp_path / "output"
    output.write_text("   5.0 s  waiting for worker-0\n")
    process = SimpleNamespace(poll=lambda: None)
    Timer(0.3, output.write_text, ["Baton is ready at http://h:1/v1"]).start()
    with places.awaiting("the fleet") as progress:
        assert places._wait_ready(process, output, progress) == "http://h:1"
    assert "waiting for worker-0\n" in capsys.readouterr().err


def test_a_lab_shows_how_much_of_its_load_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("baton.telemetry.progress._SILENT_S", 0.05)
    with places.awaiting("the load", 60.0):
        time.sleep(0.2)
    assert "waiting for the load, 60 s left\n" in capsys.readouterr().err
    with places.awaiting("the load", 0.01):  # the last responses end after the load
        time.sleep(0.2)
    assert "waiting for the load\n" in capsys.readouterr().err


def test_a_lab_that_fails_says_so(tmp_path: Path) -> None:
    failed = run("chunks", "--model", tmp_path / "nowhere", "--out", tmp_path / "x", code=1)
    assert "ended with exit code 1" in failed.stderr
    assert not (tmp_path / "x").exists()


def test_an_emulated_subject_is_named_in_the_report_and_nothing_in_it_is_html() -> None:
    findings = Findings(
        parameters={"a <b>": 1.23456},
        columns=["x"],
        rows=[[None], ["<script>"]],
        plots=[
            Plot(title="t", x_label="x", y_label="y", x=[0.0], series=[Series("</script>", [1.0])])
        ],
        sentence="It was so.",
    )
    results = LabResults(
        lab="split",
        question="Why?",
        command="baton lab",
        created="2026-11-22T00:00:00+00:00",
        machine="m",
        load_average=0.5,
        subject="s",
        emulated="epyc-135m",
        quick=True,
        findings=findings,
    )
    page = report(results)
    assert "No model ran; step times come from the timing model epyc-135m" in page
    assert "&lt;script&gt;" in page
    assert '"</script>"' not in page
    cells = [shown(cell) for cell in (None, 1.23456, 12345.6, 7, "a")]
    assert cells == ["–", "1.23", "12,346", "7", "a"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [lab.name for lab in LABS.values() if lab.needs == "engine"],
)
def test_each_engine_lab_runs_on_the_real_model(name: str, tmp_path: Path) -> None:
    run(name, "--quick", "--out", tmp_path)
    left_in(tmp_path, name)


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.timeout(1200)
def test_the_lab_of_splits_starts_a_fleet_and_measures_every_split(tmp_path: Path) -> None:
    run("split", "--quick", "--workers", 3, "--out", tmp_path)
    results = left_in(tmp_path, "split")
    assert results.emulated == "epyc-135m"
    rows = results.findings.rows
    assert [row[0] for row in rows[:2]] == ["1 + 2", "2 + 1"]
    assert str(rows[2][0]).endswith("at 1.0 x")
    assert all(0.0 < row[2] < row[1] for row in rows[:2]), "more was offered than is held"
    assert rows[2][3] >= 0.95, "the best split holds its rate"
