"""Parts of the supervisor, each alone: Ray's health, logs, the order of its end."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import grpc
import httpx
import pytest
from ray.exceptions import GetTimeoutError
from typer.testing import CliRunner

from baton.config.fleet_file import FleetConfig
from fleet.cli.main import app
from fleet.local import state as fleet_state
from fleet.local.changes import Changes
from fleet.local.local_pools import LocalPools
from fleet.local.log_files import LastingConsole, OwnOutput, rotate, terminal
from fleet.local.supervisor import FleetError, Supervisor
from fleet.local.worker_phases import ShownWorkers, all_in_place, late_workers
from fleet.pools import ray_runtime
from fleet.pools.nodes import CapacityError
from fleet.pools.ray_health import RayHealth
from fleet.pools.resources import ControllerSpec
from fleet.process_key import ProcessKey

ROOT = Path(__file__).parents[2]


def wait_for(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


# ---- Ray's health -----------------------------------------------------------------------------


def test_a_head_that_answers_anything_is_well_and_one_that_is_gone_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Defect 16: noticed without Ray, whose calls would wait for a minute; and without a proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)  # knows no method: it refuses, which is an answer
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        health = RayHealth(f"127.0.0.1:{port}", {}, look_every_s=0.02)
        time.sleep(0.5)
        assert health.problem() == ""
        server.stop(None).wait()
        wait_for(health.problem)
        assert "did not respond" in health.problem()
        health.close()


def test_a_head_that_is_frozen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 16: it takes connections, as its kernel does, and says nothing."""
    monkeypatch.setattr("fleet.pools.ray_health._ANSWER_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        health = RayHealth(f"127.0.0.1:{frozen.getsockname()[1]}", {}, look_every_s=0.0)
        wait_for(health.problem)
        health.close()


def test_a_daemon_that_died_is_named_at_once() -> None:
    """Defects 16 and 24: GCS and raylet of a local Ray."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as daemon:
        key = ProcessKey.of(daemon.pid)
        assert key is not None
        health = RayHealth("127.0.0.1:1", {"raylet": key})
        assert health.problem() == ""
        daemon.kill()
        wait_for(health.problem, 1.0)
        assert health.problem() == f"Ray's raylet (pid {daemon.pid}) died"
        health.close()


# ---- logs -------------------------------------------------------------------------------------


def test_a_log_is_bounded_while_its_writer_goes_on(tmp_path: Path) -> None:
    """Defect 19: the router's log, and those of every process that lives long."""
    log, other = tmp_path / "router.log", tmp_path / "syslog.log"
    other.write_bytes(b"x" * 2000)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first\n" * 200)
        rotate(tmp_path, limit_bytes=1000)
        writer.write(b"then\n")
        rotate(tmp_path, limit_bytes=1000)
    assert log.read_bytes() == b"then\n"
    assert (tmp_path / "router.log.1").read_bytes() == b"first\n" * 200
    assert other.stat().st_size == 2000, "not ours"


def test_what_libraries_print_goes_to_a_log(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Defect 24: Ray's paragraphs, from Python or not."""
    shown = terminal()
    output = OwnOutput(tmp_path / "ray.log")
    print("from a thread of Ray's", file=sys.__stdout__, flush=True)
    os.write(2, b"from its native code\n")
    print("one line of ours", file=shown, flush=True)
    output.release()
    os.write(1, b"as before\n")
    shown.close()
    text = (tmp_path / "ray.log").read_text()
    assert "from its native code" in text
    captured = capfd.readouterr()
    assert captured.out.endswith("one line of ours\nas before\n")
    assert captured.err == ""


def test_a_terminal_that_is_gone_costs_lines_and_no_fleet() -> None:
    """`baton up | head`, a terminal that was closed, a log on a disk that is full."""
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w")
    full = Path("/dev/full").open("w")  # noqa: SIM115 - it outlives a failed close
    for stream in (pipe, full):
        console = LastingConsole(file=stream)
        for _ in range(3):
            console.print("a line")
        with contextlib.suppress(OSError):
            stream.close()


def test_up_shows_its_lines_on_such_a_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    (tmp_path / "fleet.yaml").write_text("fleet: f\n")
    told: list[str] = []

    class Talks(Supervisor):
        def run(self, on_ready: object) -> None:
            for line in ("before", "after"):
                self._say(line)
                told.append(line)

    full = Path("/dev/full").open("w")  # noqa: SIM115 - it outlives a failed close
    monkeypatch.setattr("fleet.cli.lifecycle.Supervisor", Talks)
    monkeypatch.setattr("fleet.cli.lifecycle.terminal", lambda: full)
    done = CliRunner().invoke(app, ["up", str(tmp_path / "fleet.yaml")])
    with contextlib.suppress(OSError):
        full.close()
    assert (done.exit_code, told) == (0, ["before", "after"])


def test_lines_have_the_time_of_day_once_the_fleet_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After days, seconds since the start lead to no other log."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    (tmp_path / "fleet.yaml").write_text("fleet: f\n")

    class Talks(Supervisor):
        announced_url = "http://127.0.0.1:8000"
        chats = True

        def run(self, on_ready: Callable[[], None]) -> None:
            self._say("starting")
            on_ready()
            self._say("worker-0 died")

    out = StringIO()
    monkeypatch.setattr("fleet.cli.lifecycle.Supervisor", Talks)
    monkeypatch.setattr("fleet.cli.lifecycle.terminal", lambda: out)
    assert CliRunner().invoke(app, ["up", str(tmp_path / "fleet.yaml")]).exit_code == 0
    shown = out.getvalue()
    assert re.search(r"^ +\d+\.\d s  starting$", shown, re.MULTILINE)
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  worker-0 died$", shown, re.MULTILINE)


def test_a_fleet_with_a_drained_worker_is_taken_over_without_waiting_for_that_one() -> None:
    config = FleetConfig(fleet="f")
    slots = [{"phase": "ready"}, {"phase": "parked"}]
    assert all_in_place(slots, config)
    slots[0]["renewed_later"] = True  # between two workers of a rolling restart all are ready
    assert not all_in_place(slots, config)
    for phases in (["ready", "starting"], []):
        assert not all_in_place([{"phase": phase} for phase in phases], config)


def test_workers_that_start_show_what_they_do() -> None:
    told: list[str] = []
    shown = ShownWorkers(told.append)
    starting = {"worker_id": "worker-0", "phase": "starting", "epoch": 1, "reason": ""}
    shown.show([starting])
    for doing in ("reading weights: 10 %", "reading weights: 10 %", "reading weights: 20 %"):
        slots = [{**starting, "doing": doing}]
        shown.show(slots)
    assert late_workers(slots) == "worker-0 (reading weights: 20 %)"
    shown.show([{**slots[0], "phase": "ready"}])
    begins = "worker-0 starting"
    steps = [f"{begins}: reading weights: {percent} %" for percent in (10, 20)]
    assert told == [begins, *steps, "worker-0 ready"]
    many = [{**starting, "worker_id": f"worker-{n}", "doing": f"{n}"} for n in range(1, 10)]
    shown.show(many)  # each step of many workers would bury the rest
    assert told[-1] == "worker-9 starting"


def test_a_start_without_news_shows_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each 5 s, also while a call of Ray blocks."""
    monkeypatch.setattr("baton.telemetry.progress._SILENT_S", 0.05)
    told: list[str] = []
    supervisor = Supervisor(FleetConfig(fleet="f"), tmp_path / "fleet.yaml", told.append)
    slots = [{"worker_id": f"worker-{n}", "phase": "ready", "reason": ""} for n in range(6)]
    slots = [{**slot, "epoch": 1} for slot in slots]
    monkeypatch.setattr(supervisor, "_pools", SimpleNamespace(slots=lambda: slots))

    def start() -> None:
        supervisor._show_start()
        wait_for(lambda: "waiting for the router" in told)
        for slot in slots[1:]:
            slot["phase"] = "starting"
        supervisor._show_start()
        waits = "waiting for worker-1, worker-2, worker-3 and 2 more workers"
        wait_for(lambda: told[-2:] == [waits, waits])
        raise FleetError("that is all")

    monkeypatch.setattr(supervisor, "_start", start)
    with pytest.raises(FleetError, match="that is all"):
        supervisor.run(lambda: None)


@pytest.mark.parametrize("fails", [True, False])
def test_the_audit_log_has_a_stop_only_of_a_fleet_that_was_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    name = "fails" if fails else "serves"
    supervisor = Supervisor(FleetConfig(fleet=name), tmp_path / "fleet.yaml", lambda _: None)

    def start() -> None:
        supervisor._name = name
        supervisor._run_folder = fleet_state.new_run_folder()
        if fails:
            raise FleetError("no room")

    monkeypatch.setattr(supervisor, "_start", start)
    monkeypatch.setattr(supervisor, "_watch", lambda: None)
    with pytest.raises(FleetError) if fails else contextlib.nullcontext():
        supervisor.run(lambda: None)
    log = fleet_state.audit_file(name)
    verbs = (
        [json.loads(line)["verb"] for line in log.read_text().splitlines()] if log.exists() else []
    )
    assert verbs == ([] if fails else ["up", "down"])


def test_the_state_has_what_a_change_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(FleetConfig(fleet="f"), tmp_path / "fleet.yaml", lambda _: None)
    slot = {"worker_id": "worker-0", "phase": "starting"}
    states: list[str] = []
    monkeypatch.setattr(supervisor, "_note_state", lambda: states.append(supervisor._file.awaits))

    def look(phase: str) -> None:
        if supervisor._file.note_awaited(late_workers([{**slot, "phase": phase}])):
            supervisor._note_state()

    look("starting")
    assert states == []  # a worker that was killed is no change of the file
    supervisor._file.changing = Changes()
    for phase in ("starting", "starting", "ready"):
        look(phase)
    supervisor._file._rolling = True
    look("ready")
    supervisor._end_change()
    assert states == ["worker-0", "", "the new routers", ""]


class Ready(BaseHTTPRequestHandler):
    """A router with workers that answer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("adopted", [True, False])
def test_a_fleet_that_serves_is_taken_over_with_a_worker_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    """As after the loss of a host; a new fleet ends with the reason instead."""
    told: list[str] = []
    supervisor = Supervisor(FleetConfig(fleet="f"), tmp_path / "fleet.yaml", told.append)
    slots = [
        {"worker_id": "decode-0", "phase": "ready", "epoch": 1, "reason": ""},
        {"worker_id": "decode-1", "phase": "waiting", "epoch": 0, "reason": "no node had room"},
    ]

    def looked() -> list[dict[str, object]]:
        slots[1]["epoch"] += 1
        return [dict(slot) for slot in slots]

    pools = SimpleNamespace(
        slots=looked, adopted=adopted, news=list, problem=str, stop=lambda **_: None
    )
    monkeypatch.setattr(supervisor, "_pools", pools)
    monkeypatch.setattr("fleet.local.supervisor._POLL_S", 0.0)
    router = HTTPServer(("127.0.0.1", 0), Ready)
    supervisor._port = router.server_port
    Thread(target=router.serve_forever, daemon=True).start()
    try:
        routers = SimpleNamespace(exit_codes=[None])
        if adopted:
            slots[1]["epoch"] = 7
            supervisor._shown._first["decode-1"] = 1
            supervisor._show_start()
            supervisor._wait_until_ready(routers)
            assert "decode-1 waiting, epoch 8 (no node had room)" in told
        else:
            with pytest.raises(FleetError, match="decode-1 failed 3 times: no node had room"):
                supervisor._wait_until_ready(routers)
    finally:
        router.shutdown()
        router.server_close()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),  # it takes IPv6 only
        ("0.0.0.0", "http://127.0.0.1:8000"),
    ],
)
def test_a_fleet_is_looked_for_where_it_listens(tmp_path: Path, host: str, url: str) -> None:
    config = FleetConfig.model_validate({"host": host, "clients": {"insecure": True}})
    supervisor = Supervisor(config, tmp_path / "fleet.yaml", lambda _: None)
    supervisor._port = 8000
    assert supervisor.url == url
    announced = httpx.URL(supervisor.announced_url)  # it can be read
    assert announced.port == 8000
    assert (":" in announced.host) is (":" in host)


EMULATED = FleetConfig.model_validate({"pools": {"engine": "emulated"}})


def test_a_controller_that_does_not_start_is_an_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LateError(GetTimeoutError, RuntimeError):
        """Of Ray's, or of what starts it."""

    def fail(*_: object) -> None:
        raise LateError("75 s")

    monkeypatch.setattr(ray_runtime, "start_local", lambda *_: {})
    monkeypatch.setattr(ray_runtime, "health", lambda: None)
    spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
    for step in ("start", "start_local"):
        owner = ray_runtime.Controller if step == "start" else ray_runtime
        monkeypatch.setattr(owner, step, fail)
        with pytest.raises(CapacityError, match="failed to start: 75 s; see `baton logs controll"):
            LocalPools(EMULATED, Path()).start(spec)


IMPORTS = """
import sys
from pathlib import Path
from baton.config.fleet_file import FleetConfig
from fleet.local.local_pools import LocalPools
from fleet.pools import ray_runtime
from fleet.pools.nodes import CapacityError
from fleet.pools.resources import ControllerSpec

def start(*_):
    print("ray" in sys.modules)
    raise RuntimeError("no Ray here")

ray_runtime.start_local = start
spec = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
config = FleetConfig.model_validate({"pools": {"engine": "emulated"}})
try:
    LocalPools(config, Path()).start(spec)
except CapacityError as error:
    print(error)
"""


def test_ray_is_imported_by_what_sets_up_its_token() -> None:
    """It reads at its import whether it shall show one."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("False\nRay failed to start: no Ray here; see")


def test_the_router_ends_first_and_a_fault_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect 24: streams end as a fleet that stops, not as workers that were lost."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    supervisor = Supervisor(FleetConfig(fleet="f"), tmp_path / "fleet.yaml", lambda _: None)
    order: list[str] = []
    run_folder = tmp_path / "bt-run"
    run_folder.mkdir()

    def fail() -> None:
        order.append("workers")
        raise RuntimeError("Ray says something new")

    monkeypatch.setattr(supervisor, "_run_folder", run_folder)
    monkeypatch.setattr(supervisor, "_stop_workers", fail)
    ends = [lambda *_, name=name: order.append(name) for name in ("router", "ended", "redis")]
    router = SimpleNamespace(begin_stop=ends[0], finish_stop=ends[1])
    monkeypatch.setattr(supervisor, "_routers", router)
    monkeypatch.setattr(supervisor, "_redis", SimpleNamespace(stop=ends[2]))
    with pytest.raises(RuntimeError, match="something new"):
        supervisor._take_down()
    assert order == ["router", "ended", "workers", "redis"]
    assert not run_folder.exists()
