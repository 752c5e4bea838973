"""Routers that share a port, as `baton up` starts them: real processes, a real Redis."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from fleet.local.checks.preflight import PortTakenError, claim_socket
from fleet.local.redis_server import EmbeddedRedis
from fleet.local.router_process import RouterProcesses, _Life, listening_sockets
from tests.engine.lora_files import write_adapter

LIMIT_S = 90.0

Start = Callable[[int], RouterProcesses]


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path, redis_server: EmbeddedRedis) -> Iterator[Start]:
    """Starts so many routers behind one port."""
    environment = {
        **os.environ,
        "BATON_REDIS_URL": redis_server.url,
        "BATON_FLEET_TOKEN": "t",
        "BATON_STATE_DIR": str(tmp_path),
    }
    started: list[RouterProcesses] = []
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: bench\nserved_model_name: [smollm2]\nadapters: {folder: .}\n")

    def begin(count: int) -> RouterProcesses:
        routers = RouterProcesses("127.0.0.1", 0, count)
        started.append(routers)
        routers.start(file, environment, tmp_path / "group", tmp_path)
        wait_for(lambda: [routers.serving(i) for i in range(count)] == routers.pids)
        return routers

    yield begin
    for routers in started:
        routers.begin_stop()
        routers.finish_stop(5.0)


def test_a_port_that_several_routers_share_is_never_free_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the check and the last socket another fleet of this user would join in."""
    refused: list[str] = []

    def watched(address: tuple[str, int], **options: Any) -> socket.socket:
        with pytest.raises(PortTakenError) as error:
            claim_socket("127.0.0.1", address[1])
        refused.append(str(error.value))
        return socket.create_server(address, **options)

    held = claim_socket("127.0.0.1", 0)
    port = held.getsockname()[1]
    held.close()
    sockets_of = SimpleNamespace(**{name: getattr(socket, name) for name in dir(socket)})
    sockets_of.create_server = watched
    monkeypatch.setattr("fleet.local.router_process.socket", sockets_of)
    sockets = listening_sockets("127.0.0.1", port, 3)
    for one in sockets:
        one.close()
    assert (len(sockets), len(refused)) == (3, 2)


def url_of(routers: RouterProcesses, path: str = "/health/live") -> str:
    return f"http://127.0.0.1:{routers.port}{path}"


def status(url: str) -> int:
    return httpx.get(url, timeout=LIMIT_S, trust_env=False).status_code


class Clients:
    """Threads that connect anew all the time, and what became of each call."""

    def __init__(self, url: str, count: int = 2) -> None:
        self.answers: list[object] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(count)]

    def _ask(self, url: str) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(status(url))
            except httpx.HTTPError as error:
                self.answers.append(error)

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.answers) > 4)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def keep_until(routers: RouterProcesses, condition: Callable[[], object]) -> None:
    def step() -> object:
        routers.keep(lambda _: None)
        return condition()

    wait_for(step)


# ---- one router -------------------------------------------------------------------------------


def test_a_router_runs_no_fork_handlers_of_grpc(start: Start) -> None:
    """With them 2 of 40 starts of the process that checks grammars failed."""
    [pid] = start(1).pids
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"GRPC_ENABLE_FORK_SUPPORT=0" in variables


@pytest.mark.slow
def test_connections_made_while_a_router_is_started_again_wait(start: Start) -> None:
    """Defect 21: none is refused, and each is answered by the next life."""
    routers = start(1)
    os.kill(routers.pids[0], signal.SIGKILL)
    wait_for(lambda: routers.exit_codes == [-signal.SIGKILL])
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(status(url_of(routers)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    routers.keep(lambda _: None)
    for thread in threads:
        thread.join(LIMIT_S)
    assert answers == [200] * 8


def test_a_standstill_is_not_the_time_of_a_successor() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        life = _Life(process)
    assert not life.is_late(life.started_s + 1000.0)
    looks = [life.is_late(life.started_s + 1000.0 + second) for second in range(70)]
    assert looks.index(True) == 56  # the standstill counts as 5 s


def test_a_stopped_router_refuses_connections(start: Start) -> None:
    """Defect 21: the socket that is held must not let clients wait for nobody."""
    routers = start(1)
    assert status(url_of(routers)) == 200
    routers.begin_stop()
    routers.finish_stop(5.0)
    assert routers.exit_codes == [0]
    with pytest.raises(httpx.ConnectError):
        status(url_of(routers))


# ---- several ----------------------------------------------------------------------------------


def test_a_port_is_shared_by_our_own_sockets_only() -> None:
    sockets = listening_sockets("127.0.0.1", 0, 3)
    try:
        ports = {one.getsockname()[1] for one in sockets}
        assert (len(sockets), len(ports)) == (3, 1)
        with pytest.raises(PortTakenError):
            listening_sockets("127.0.0.1", ports.pop(), 3)
    finally:
        for one in sockets:
            one.close()


def test_without_shared_ports_there_is_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    sockets = listening_sockets("127.0.0.1", 0, 3)
    assert len(sockets) == 1
    sockets[0].close()


@pytest.mark.slow
def test_the_connections_of_a_dead_router_are_taken_by_the_others(start: Start) -> None:
    """Not black-holed: nobody waits for the next life, which is not even begun here."""
    routers = start(2)
    with Clients(url_of(routers)) as clients:
        os.kill(routers.pids[1], signal.SIGKILL)
        wait_for(lambda: routers.exit_codes[1] is not None)
        before = len(clients.answers)
        wait_for(lambda: len(clients.answers) > before + 50)  # a half of them was its own
    broken = [answer for answer in clients.answers if answer != 200]
    assert len(broken) <= 2, broken  # those that it had accepted: one of each client
    first = routers.pids[1]
    keep_until(routers, lambda: routers.serving(1) not in (0, first))
    assert routers.serving(0) == routers.pids[0]


@pytest.mark.slow
def test_the_connections_of_a_router_that_hangs_are_taken_by_the_others(start: Start) -> None:
    """Its silence is noticed: who waits for it is answered by the other, and nobody is refused."""
    routers = start(2)
    with Clients(url_of(routers), count=4) as clients:
        os.kill(routers.pids[1], signal.SIGSTOP)
        try:
            before = len(clients.answers)
            wait_for(lambda: len(clients.answers) > before + 100)
            # All that wait in its part of the port, or each of the four would hang there soon.
            assert routers.serving(1) == 0
        finally:
            os.kill(routers.pids[1], signal.SIGCONT)
        wait_for(lambda: routers.serving(1) == routers.pids[1])
        before = len(clients.answers)
        wait_for(lambda: len(clients.answers) > before + 20)
    assert set(clients.answers) == {200}


@pytest.mark.slow
def test_routers_are_replaced_without_one_refused_connection(start: Start) -> None:
    routers = start(2)
    before = routers.pids
    with Clients(url_of(routers)) as clients:
        routers.roll()
        keep_until(routers, lambda: routers.settled and not set(before) & set(routers.pids))
    assert set(clients.answers) == {200}
    assert [routers.serving(index) for index in range(2)] == routers.pids


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_counters_and_reports_outlive_a_router(start: Start, count: int) -> None:
    routers = start(count)
    call = {"model": "smollm2", "prompt": "x"}

    def refused_id() -> str:
        answer = httpx.post(url_of(routers, "/v1/completions"), json=call, trust_env=False)
        assert answer.status_code == 503
        return answer.headers["x-request-id"]

    def counted() -> float:
        page = httpx.get(url_of(routers, "/metrics"), trust_env=False).text
        found = re.findall(r"^baton_requests_total.*status=\"503\".* (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    names = [refused_id() for _ in range(3)]
    wait_for(lambda: counted() == len(names), 5.0)  # they may not know each other yet
    for _ in range(2):
        assert counted() == len(names)
        before = routers.pids
        routers.roll()
        keep_until(routers, lambda old=before: routers.settled and not set(old) & set(routers.pids))
        names.append(refused_id())
    url = url_of(routers, "/fleet/requests")
    listed = httpx.get(url, trust_env=False).json()["requests"]
    assert [one["id"] for one in listed] == names[::-1]
    for name in names:
        report = httpx.get(f"{url}/{name}", trust_env=False).json()
        assert (report["id"], report["status"]) == (name, 503)


@pytest.mark.slow
def test_a_router_that_leaves_answers_who_has_asked_nothing_yet(start: Start) -> None:
    routers = start(1)
    with contextlib.ExitStack() as opened:
        clients = [
            opened.enter_context(socket.create_connection(("127.0.0.1", routers.port)))
            for _ in range(4)
        ]
        assert status(url_of(routers)) == 200  # so these are accepted
        os.kill(routers.pids[0], signal.SIGUSR1)
        time.sleep(0.3)
        for client in clients:
            client.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = [client.makefile("rb").read() for client in clients]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert all(b"connection: close" in answer for answer in answers)
    wait_for(lambda: routers.exit_codes == [0])


class Group:
    """Two routers and a worker; calls go to one of the routers by its own socket."""

    def __init__(self, routers: RouterProcesses, folder: Path) -> None:
        self.routers = routers
        self._clients = [
            httpx.Client(
                transport=httpx.HTTPTransport(uds=str(folder / f"{index}.http")),
                base_url="http://router",
                timeout=LIMIT_S,
            )
            for index in range(2)
        ]

    def get(self, index: int, path: str) -> httpx.Response:
        return self._clients[index].get(path)

    def post(self, index: int, path: str, body: dict | None = None) -> httpx.Response:
        return self._clients[index].post(
            path, json=body or {}, headers={"authorization": "Bearer t"}
        )

    def stream(self, index: int, path: str, body: dict) -> contextlib.AbstractContextManager:
        return self._clients[index].stream("POST", path, json=body)

    def count(self, index: int, metric: str) -> float:
        page = self.get(index, "/metrics").text
        found = re.findall(rf"^{metric}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def group(start: Start, redis_server: EmbeddedRedis, tmp_path: Path) -> Iterator[Group]:
    command = [sys.executable, "-m", "benchmarks.router.workers", "--count", "1"]
    options = ["--redis", redis_server.url, "--step-s", "0.02"]
    workers = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
    assert workers.stdout is not None
    try:
        assert workers.stdout.readline() == b"ready\n"
        made = Group(start(2), tmp_path / "group")
        for index in range(2):
            wait_for(lambda index=index: made.get(index, "/health").status_code == 200)
        yield made
        made.close()
    finally:
        workers.kill()
        workers.wait()
        workers.stdout.close()


@pytest.mark.slow
def test_any_router_answers_for_all(group: Group) -> None:
    """One test, as its start takes seconds: metrics, lists, finds, cancels, and a death."""
    asked = {"model": "smollm2", "prompt": "Hello", "max_tokens": 3}
    ids = [group.post(index, "/v1/completions", asked).json()["id"] for index in (0, 0, 1)]
    for index in range(2):
        listed = group.get(index, "/fleet/requests").json()["requests"]
        assert [request["id"] for request in listed] == ids[::-1]
        for name in ids:
            assert group.get(index, f"/fleet/requests/{name}").json()["id"] == name
        assert group.count(index, "baton_generation_tokens_total") == 9
        assert group.count(index, "baton_workers") == 1
    assert group.get(0, "/fleet/requests/none").status_code == 404

    long = {"model": "smollm2", "input": "Hello", "max_output_tokens": 2000, "stream": True}
    with group.stream(1, "/v1/responses", long) as answer:
        lines = answer.iter_lines()
        name = next(json.loads(line[6:]) for line in lines if line[:6] == "data: ")["response"][
            "id"
        ]
        assert group.get(0, "/load").json() == group.get(1, "/load").json() == {"server_load": 1}
        assert group.get(0, f"/v1/responses/{name}").json()["status"] == "in_progress"
        assert group.post(0, f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
        assert "response.completed" not in "".join(lines)
    assert group.post(0, f"/v1/responses/{name}/cancel").status_code in (400, 404)

    counted = group.count(0, "baton_generation_tokens_total")
    routers, gone = group.routers, group.routers.pids[1]
    os.kill(gone, signal.SIGKILL)
    keep_until(routers, lambda: routers.serving(1) not in (0, gone))
    wait_for(lambda: group.count(0, "baton_generation_tokens_total") == counted)
    for index in range(2):
        assert group.count(index, "baton_generation_tokens_total") == counted


@pytest.mark.slow
def test_routers_tell_each_other_of_adapters(group: Group, tmp_path: Path) -> None:
    """Loaded by one and taken away by the other: both follow."""
    config = resolve_model(DEFAULT_MODEL).config
    path = write_adapter(tmp_path / "adapter", config, rank=4, layers=(0,))

    def listed(index: int) -> bool:
        models = group.get(index, "/v1/models").json()["data"]
        return "mine" in [model["id"] for model in models]

    body = {"lora_name": "mine", "lora_path": str(path)}
    assert group.post(0, "/v1/load_lora_adapter", body).status_code == 200
    wait_for(lambda: listed(1))
    asked = {"model": "mine", "prompt": "Hello", "max_tokens": 3}
    assert group.post(1, "/v1/completions", asked).json()["model"] == "mine"
    assert group.post(1, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    wait_for(lambda: not listed(0))
    assert group.post(0, "/v1/completions", asked).status_code == 404
