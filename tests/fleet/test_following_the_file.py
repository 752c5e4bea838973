"""A change of the fleet file that fails ends nothing, and is finished by the next try."""

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from baton.config.fleet_file import FleetConfig
from fleet.cli.lifecycle import reconcile_running
from fleet.local import state as fleet_state
from fleet.local.changes import changes
from fleet.local.fleet_token import KnownToken
from fleet.local.local_pools import LocalPools
from fleet.local.router_process import RouterProcesses
from fleet.local.supervisor import Supervisor
from fleet.pools import ray_runtime
from fleet.pools.nodes import CapacityError, Node
from fleet.pools.resources import ControllerSpec
from fleet.process_key import ProcessKey

OLD = FleetConfig(fleet="f", port=9)
NEW = FleetConfig(fleet="f", port=9, max_queued_requests=7)
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
FOLLOWS = """
import signal, sys, msgspec
from fleet.local import state
signal.signal(signal.SIGUSR1, lambda *_: None)
print(flush=True)
signal.pause()
found = state.load("f")
state.save(msgspec.structs.replace(found, changes_done=1, change_problem=""))
signal.pause()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def supervisor(home: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Its workers are in place; what it is asked to change, is changed."""
    made = Supervisor(OLD, home / "f.yaml", told.append, reread=lambda: NEW)
    pools = SimpleNamespace(change=lambda *_: None, slots=lambda: [{"phase": "ready"}])
    monkeypatch.setattr(made, "_pools", pools)
    return made


def follow(supervisor: Supervisor, rounds: int = 3) -> None:
    supervisor._stop._change.set()
    for _ in range(rounds):
        supervisor._follow_changes()


def test_a_full_disk_at_the_end_of_a_change_ends_no_fleet(
    supervisor: Supervisor, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "state.new")

    monkeypatch.setattr(fleet_state, "save", full)
    follow(supervisor)
    assert "cannot write the fleet's state: [Errno 28] No space left on device" in told[-1]


def test_files_of_a_model_that_cannot_be_read_end_no_fleet(
    supervisor: Supervisor, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/m.gguf")

    monkeypatch.setattr("fleet.local.followed_file.describe_model", unreadable)
    follow(supervisor)
    assert "the fleet is unchanged: [Errno 13] Permission denied: '/models/m.gguf'" in told[-1]


def test_a_controller_that_is_late_with_a_change_ends_no_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object) -> None:
        raise GetTimeoutError("75 s")

    followed = object()
    monkeypatch.setattr("fleet.pools.nodes.check_nodes", lambda *_: None)
    monkeypatch.setattr("fleet.pools.placement.cluster_nodes", list)
    monkeypatch.setattr(ray_runtime.Controller, "ensure", late)
    monkeypatch.setattr(ray_runtime.Controller, "find", lambda _: followed)
    pools = LocalPools(OLD, Path())
    spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
    with pytest.raises(CapacityError, match="did not start with the new settings: 75 s"):
        pools.change(NEW, spec)
    assert pools._controllers == {OLD.fleet: followed}, "the one that runs is watched"


def test_models_that_do_not_fit_together_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would fit alone; the last one's workers would wait for room for ever."""
    here = Node(id="n", name="n", address="127.0.0.1", head=True, cpus=3.0)
    monkeypatch.setattr("fleet.pools.placement.cluster_nodes", lambda: [here])
    pools = LocalPools(OLD, Path())
    spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
    pools_of = {"model": "package:m", "pools": {"prefill": 1, "decode": 1}}
    models = {"one": pools_of, "two": pools_of}
    new = FleetConfig.model_validate({"fleet": "f", "models": models})
    with pytest.raises(CapacityError, match="need 4 CPUs together, the running fleet has 3"):
        pools.change(new, spec)


def test_routers_that_could_not_follow_are_replaced_by_the_next_try(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rolls: list[str] = []
    routers = SimpleNamespace(roll=lambda: rolls.append("roll"), rolled=True, roll_failed="no file")
    monkeypatch.setattr(supervisor, "_routers", routers)
    follow(supervisor)
    (state,) = fleet_state.load_all()
    assert rolls == ["roll"] and "no file" in state.change_problem
    routers.roll_failed = ""
    follow(supervisor)  # with the same file: it was another file, such as a key's, that was wrong
    assert rolls == ["roll", "roll"]
    (state,) = fleet_state.load_all()
    assert state.change_problem == ""
    follow(supervisor)
    assert rolls == ["roll", "roll"], "once is enough"


def test_a_change_that_was_not_finished_is_no_nothing_has_changed(
    home: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor._file.problem = "the successor of the router does not serve"
    supervisor._save_state()
    with subprocess.Popen([sys.executable, "-c", FOLLOWS], stdout=subprocess.PIPE) as own:
        try:
            assert own.stdout is not None
            own.stdout.readline()
            key = ProcessKey.of(own.pid)
            assert key is not None
            (state,) = fleet_state.load_all()
            fields = {name: getattr(state, name) for name in state.__struct_fields__}
            fleet_state.save(type(state)(**{**fields, "supervisor": key}))
            reconcile_running(home / "f.yaml", OLD, dry_run=False)
        finally:
            own.kill()
    assert capsys.readouterr().out.splitlines() == [
        "retrying: the successor of the router does not serve",
        "the fleet matches its file",
    ]


def test_a_token_that_follows_another_is_no_change_of_the_api_keys(
    home: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "fleet.token"
    file.write_text("the-old-token-of-the-fleet")
    supervisor._token = KnownToken("the-old-token-of-the-fleet", str(file))
    supervisor._save_state()
    file.write_text("the-new-token-of-the-fleet")
    reconcile_running(home / "f.yaml", OLD, dry_run=True)
    assert capsys.readouterr().out == "nothing has changed\n"


class Launches:
    """Stands for routers: processes that sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.indexes: list[int] = []
        self.problem: OSError | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.routers = RouterProcesses("127.0.0.1", 0, count)
        monkeypatch.setattr(self.routers, "_launch", self._launch)
        monkeypatch.setattr(self.routers, "serving", lambda _: self.started[-1].pid)
        self.keep()

    def _launch(self, index: int) -> "subprocess.Popen[bytes]":
        if self.problem is not None:
            raise self.problem
        self.indexes.append(index)
        self.started.append(subprocess.Popen(SLEEP))
        return self.started[-1]

    def keep(self) -> None:
        self.routers.keep(lambda _: None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    made = Launches(monkeypatch, 2)
    yield made
    for process in made.started:
        process.send_signal(signal.SIGKILL)
        process.wait()
    made.routers.begin_stop()


def test_a_router_that_is_being_replaced_when_the_file_changes_again_is_replaced_again(
    launches: Launches,
) -> None:
    assert launches.indexes == [0, 1]
    launches.routers.roll()
    launches.keep()  # the next life of router 0 has read the file
    assert launches.indexes[2:] == [0]
    launches.routers.roll()
    for _ in range(10):
        launches.keep()
    assert launches.routers.rolled
    assert launches.indexes[2:] == [0, 1, 0]


def test_a_router_that_cannot_be_started_for_a_moment_ends_no_fleet(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.local.router_process._SPAWN_PAUSE_S", 0.0, raising=False)
    launches.started[1].kill()
    launches.started[1].wait()
    launches.problem = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    launches.keep()
    launches.routers.roll()
    launches.keep()
    assert "Resource temporarily unavailable" in launches.routers.roll_failed
    launches.problem = None
    launches.keep()
    assert launches.indexes == [0, 1, 1]


def test_a_plan_still_says_what_has_changed() -> None:
    assert changes(OLD, NEW).keys == ("max_queued_requests",)
