"""A state folder has one supervisor at a time, whatever starts and stops at the same instant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from fleet.cli.lifecycle import _bring_down
from fleet.local import state as fleet_state
from fleet.local.state import FleetLock
from fleet.local.supervisor import FleetError, Supervisor
from fleet.process_key import ProcessKey

HOLDER = """
import sys, time
from fleet.local.state import FleetLock
print(FleetLock.take("f") is not None, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setattr("fleet.local.state._LOCK_WAIT_S", 0.1, raising=False)
    return tmp_path


def supervisor(home: Path, port: int, **more: object) -> Supervisor:
    made = Supervisor(FleetConfig(fleet="f", **more), home / "f.yaml", lambda _: None)
    made._port = port
    made._run_folder = home / f"run-{port}"
    return made


def test_two_that_start_at_the_same_instant_get_two_folders(home: Path) -> None:
    first, second = supervisor(home, 1), supervisor(home, 2)
    first._choose_name()
    second._choose_name()  # the first one has saved no state yet
    for started in (first, second):
        started._save_state()
    assert [state.name for state in fleet_state.load_all()] == ["f", "f-2"]


def test_two_that_would_share_a_redis_are_one_and_a_message(home: Path) -> None:
    redis = "redis://127.0.0.1:1/0"
    first, second = supervisor(home, 1, redis=redis), supervisor(home, 2, redis=redis)
    first._choose_name()
    with pytest.raises(FleetError, match=r"already running \(starting\).*name with `fleet:`"):
        second._choose_name()


def test_a_supervisor_that_was_killed_leaves_no_lock(home: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert FleetLock.take("f") is None
        holder.kill()
        holder.wait()
    assert FleetLock.take("f") is not None


def test_down_does_not_forget_the_fleet_that_followed(home: Path) -> None:
    """Under systemd the next `baton up` begins while `baton down` still sweeps."""
    old, new = supervisor(home, 1), supervisor(home, 2)
    old._save_state()
    (ended,) = fleet_state.load_all()
    ended = type(ended)(**{**_fields(ended), "supervisor": ProcessKey(os.getpid(), 1.0)})
    new._save_state()
    assert _bring_down(ended)
    assert [state.url for state in fleet_state.load_all()] == [new.url]
    fleet_state.save(ended)
    assert _bring_down(ended)
    assert fleet_state.load_all() == []


def _fields(state: fleet_state.FleetState) -> dict[str, object]:
    return {name: getattr(state, name) for name in state.__struct_fields__}


def test_a_copy_beside_a_fleet_leaves_that_ones_figures_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy = supervisor(home, 1), supervisor(home, 0)
    first._choose_name()
    first._save_state()
    (home / "f" / "transfers.json").write_text("{}")
    monkeypatch.chdir(home)  # a start changes the folder
    monkeypatch.setenv(fleet_state.RUN_FOLDER_VARIABLE, "")
    monkeypatch.setattr(copy._redis, "start", lambda *_: None)
    monkeypatch.setattr(copy, "_start_workers", lambda: None)
    for step in ("_start_routers", "_wait_until_ready"):
        monkeypatch.setattr(copy, step, lambda routers: routers.begin_stop())
    copy._start()
    copy._take_down()
    assert copy._name != "f"
    assert (home / "f" / "transfers.json").exists()
