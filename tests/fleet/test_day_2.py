"""`docs/guide/day-2.md`: back-up and restore, with the files that it names."""

import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.tenants.audit import file as audit_file
from baton.tenants.audit.chain import Entry
from fleet.cli.main import app
from fleet.local.fleet_token import fleet_token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("BATON_FLEET_TOKEN", "BATON_FLEET_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def test_a_restored_folder_has_the_token_and_the_whole_audit_log(home: Path, tmp_path: Path):
    token = fleet_token("one").token
    log = home / "one" / "audit.jsonl"
    for verb in ("up", "scale"):
        audit_file.append(log, [Entry(verb=verb, what="f", who="operator ann", source="a")])
    (home / "one" / "logs").mkdir()
    backup = tmp_path / "backup"
    shutil.copytree(home / "one", backup, ignore=shutil.ignore_patterns("lock", "logs"))
    shutil.rmtree(home)
    assert fleet_token("one").token != token, "a new folder has a new token"
    shutil.rmtree(home / "one")
    shutil.copytree(backup, home / "one")
    restored = fleet_token("one")
    assert restored.token == token
    assert stat.S_IMODE(Path(restored.file).stat().st_mode) == 0o600
    verified = CliRunner().invoke(app, ["audit", "verify", "--fleet", "one"])
    assert verified.exit_code == 0, verified.output
    listed = CliRunner().invoke(app, ["audit", "ls", "--fleet", "one"])
    assert "scale" in listed.output
