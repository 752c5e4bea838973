"""What a killed fleet left behind is found, and nothing else is touched."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleet.local import state as fleet_state
from fleet.local.state import RUN_FOLDER_VARIABLE, FleetState
from fleet.process_key import ProcessKey


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    return tmp_path


def state(supervisor: ProcessKey, run_folder: Path) -> FleetState:
    return FleetState(
        name="f",
        fleet="f",
        supervisor=supervisor,
        run_folder=str(run_folder),
        url="http://127.0.0.1:1",
        redis_url="redis://:secret@127.0.0.1:1/0",
        log_dir="",
        config_file="",
    )


def test_a_state_is_kept_for_its_user_only(home: Path) -> None:
    me = ProcessKey.of(os.getpid())
    assert me is not None
    fleet_state.save(state(me, home))
    assert (home / "f" / "state.json").stat().st_mode & 0o077 == 0
    assert fleet_state.load("f") == state(me, home)
    assert [found.running for found in fleet_state.load_all()] == [True]
    fleet_state.forget("f")
    assert fleet_state.load_all() == []


def test_a_reused_pid_is_not_the_supervisor(home: Path) -> None:
    other_life = ProcessKey(os.getpid(), 1.0)
    assert not state(other_life, home).running


def test_a_sweep_ends_the_processes_of_one_run_only() -> None:
    folder = fleet_state.new_run_folder()
    (folder / "redis.sock").touch()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = subprocess.Popen(
        sleep, env={**os.environ, RUN_FOLDER_VARIABLE: str(folder)}, start_new_session=True
    )
    another = subprocess.Popen(sleep, env={**os.environ, RUN_FOLDER_VARIABLE: f"{folder}x"})
    try:
        assert fleet_state.sweep(str(folder)) == 1
        assert ours.wait(1) is not None
        assert another.poll() is None
        assert not folder.exists()
    finally:
        another.kill()
        another.wait()
        ours.wait()


def test_a_sweep_never_removes_a_folder_that_is_not_a_run(home: Path) -> None:
    fleet_state.sweep(str(home))
    assert home.exists()


def test_a_clock_that_is_set_changes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 12: else `baton up` takes a fleet that runs for a dead one, and sweeps it away."""
    key = ProcessKey.of(os.getpid())
    assert key is not None
    started_s = psutil.Process().create_time()  # which follows the wall clock
    for hour in (-3600.0, 3600.0):
        monkeypatch.setattr(psutil.Process, "create_time", lambda _, h=hour: started_s + h)
        found = key.find()
        assert found is not None and found.pid == os.getpid()
        assert ProcessKey.of(os.getpid()) == key
