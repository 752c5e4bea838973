"""`baton usage`: a table, CSV and JSON of a running router. Real Redis."""

import asyncio
import csv
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fleet.cli import usage as command
from fleet.cli.main import app
from fleet.cli.usage import _print_table
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, artifact, make_fleet, model

__all__ = ["artifact", "make_fleet", "model", "redis_server", "registry"]


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def run(url: str, *arguments: str, code: int = 0) -> str:
    given = ["usage", *arguments, "--url", url, "--api-key", "secret"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == code, result.output
    return result.output


async def test_the_command_shows_a_table_csv_and_json(make_fleet, registry) -> None:
    fleet = await make_fleet({"decode-0": None}, registry=registry)
    for tenant in ("team", "team", "free"):
        await fleet.chat(headers={"x-baton-tenant": tenant})
    await fleet.chat(headers={"x-baton-tenant": "free"}, n=-1)

    async def shown(*arguments: str) -> str:
        return await asyncio.to_thread(run, fleet.url, *arguments)

    text = await shown("--csv", "--by", "hour,tenant,model")
    rows = list(csv.DictReader(io.StringIO(text)))
    first, team = (row for row in rows if row["model"] == MODEL)
    assert (first["tenant"], first["requests"], first["output_tokens"]) == ("free", "1", "4")
    assert (team["tenant"], team["requests"], team["output_tokens"]) == ("team", "2", "8")
    assert team["hour"].endswith(":00Z") and team["key"] == ""
    (refused,) = (row for row in rows if row["refusals"])
    assert (refused["tenant"], json.loads(refused["refusals"])) == ("free", {"invalid_request": 1})
    lines = json.loads(await shown("--json"))["lines"]
    assert [line["requests"] for line in lines if line["tenant"] != "(idle)"] == [1, 2]
    table = [line.split()[:3] for line in (await shown()).splitlines()]
    assert ["team", "2", "0"] in table and ["free", "1", "1"] in table
    assert len((await shown("--csv", "--to", "2026-01-01")).splitlines()) == 1, "only names"


async def test_requests_in_the_first_second_of_an_hour_are_shown(
    make_fleet, registry, monkeypatch
) -> None:
    fleet = await make_fleet({"decode-0": None}, registry=registry)
    await fleet.chat(headers={"x-baton-tenant": "team"})
    now_s = int(time.time())
    monkeypatch.setattr(command, "time", SimpleNamespace(time=lambda: now_s - now_s % 3600 + 0.5))
    lines = json.loads(await asyncio.to_thread(run, fleet.url, "--json"))["lines"]
    assert [line["requests"] for line in lines if line["tenant"] == "team"] == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", "yesterday"), "--from 'yesterday': must be a day such as 2026-01-31"),
        (("--from", "2026-01-02", "--to", "2026-01-02"), "--from must be before --to"),
    ],
)
def test_wrong_times_are_refused(arguments, said) -> None:
    assert said in run("http://127.0.0.1:1", *arguments, code=1)


LINE = {
    "tenant": "team-of-search",
    "requests": 123_456,
    "refusals": {"queue_full": 1234},
    "input_tokens": 87_654_321,
    "cached_tokens": 7_654_321,
    "output_tokens": 8_765_432,
    "worker_s": 86_400.0,
    "cost": 0.0,
    "cost_per_1000_input": 0.0,
    "cost_per_1000_output": 0.0,
}


def test_a_table_reads_at_80_columns_and_cuts_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _print_table([LINE], ["tenant"])
    plain = capsys.readouterr().out
    _print_table([LINE | {"cost": 12.5, "cost_per_1000_input": 0.000123}], ["tenant"])
    priced = capsys.readouterr().out
    for shown in (plain, priced):
        assert "…" not in shown
        for figure in ("requests", "refused", "123,456", "87,654,321", "86,400.0"):
            assert figure in shown
    assert max(map(len, plain.splitlines())) <= 80
    assert "cost" not in plain
    assert "0.000123" in priced
    assert "12.5000" in priced
