"""The fleet file of a running fleet is found again, wherever its supervisor works."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.config.fleet_file import FleetConfig
from fleet.cli.lifecycle import reconcile_running
from fleet.cli.main import app
from fleet.local import state as fleet_state
from fleet.local.supervisor import Supervisor

FILE = "fleet: f\nmax_queued_requests: {}\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, and the current folder as it was."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    before = Path.cwd()
    yield tmp_path
    os.chdir(before)


def test_a_relative_path_is_read_again_after_the_supervisor_has_changed_its_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "fleet.yaml").write_text(FILE.format(77))
    (home / "elsewhere").mkdir()
    again: list[FleetConfig] = []

    class Started(Supervisor):
        def run(self, on_ready: object) -> None:
            os.chdir(home / "elsewhere")
            assert self._file._reread is not None
            again.append(self._file._reread())

    monkeypatch.setattr("fleet.cli.lifecycle.Supervisor", Started)
    os.chdir(home)
    done = CliRunner().invoke(app, ["up", "fleet.yaml"])
    assert done.exit_code == 0, done.output
    assert [config.max_queued_requests for config in again] == [77]


def test_a_mounted_file_whose_target_is_replaced_is_still_the_fleets(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Kubernetes mounts a Secret: a link to a link, whose folder is replaced and removed."""
    mount, first, second = home / "mount", home / "mount/..one", home / "mount/..two"
    first.mkdir(parents=True)
    (first / "fleet.yaml").write_text(FILE.format(1))
    (mount / "..data").symlink_to("..one")
    (mount / "fleet.yaml").symlink_to("..data/fleet.yaml")
    supervisor = Supervisor(FleetConfig(fleet="f"), mount / "fleet.yaml", lambda _: None)
    supervisor._save_state()

    second.mkdir()
    (second / "fleet.yaml").write_text(FILE.format(2))
    (mount / "..new").symlink_to("..two")
    (mount / "..new").rename(mount / "..data")
    (first / "fleet.yaml").unlink()
    first.rmdir()

    (state,) = fleet_state.load_all()
    assert Path(state.config_file).read_text() == FILE.format(2), "a router that starts reads it"
    reconcile_running(mount / "fleet.yaml", FleetConfig(fleet="f", port=9), dry_run=True)
    assert "nothing has changed" in capsys.readouterr().out
