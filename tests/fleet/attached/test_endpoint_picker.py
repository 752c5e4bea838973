"""`baton epp` behind a real Envoy, in front of two processes that speak vLLM's HTTP.

One server sends KV events, the other one does not.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fleet.attached.envoy import SUBSET_HEADER, Envoy
from tests.fleet.attached.rig import AttachedFleet
from tests.fleet.test_up import wait_for
from tests.registry.redis_servers import free_ports

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
SMOL = "smol"
_random = random.Random(7)


class Server:
    """Process of one emulated server."""

    def __init__(self, port: int, *more: str) -> None:
        self.port = port
        self.name = f"127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "benchmarks.emulated_vllm", str(port), *more]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Rig(NamedTuple):
    """A gateway, its picker and two servers."""

    envoy: Envoy
    fleet: AttachedFleet
    servers: list[Server]
    picker_port: int

    def ask(self, prompt: Any, buffered: bool = False, **more: Any) -> httpx.Response:
        url = self.envoy.buffered if buffered else self.envoy.streamed
        body = {"model": SMOL, "prompt": prompt, "max_tokens": 2, **more}
        return post(f"{url}/v1/completions", json=body)

    def metric(self, name: str, **labels: str) -> float:
        page = httpx.get(f"{self.fleet.url}/metrics", trust_env=False, timeout=10).text
        shown = "".join(f'{key}="{value}"' for key, value in labels.items())
        lines = (line for line in page.splitlines() if line.startswith(name) and shown in line)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @property
    def silent(self) -> Server:
        return self.servers[0]

    @property
    def speaking(self) -> Server:
        return self.servers[1]

    def all_ready(self) -> bool:
        return self.fleet.ready() == {server.name for server in self.servers}


def post(url: str, **more: Any) -> httpx.Response:
    return httpx.post(url, trust_env=False, timeout=60, **more)


def tokens(count: int) -> list[int]:
    return [_random.randrange(1000, 40_000) for _ in range(count)]


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def upstream(response: httpx.Response) -> str:
    return str(response.headers["x-upstream"])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("picker")
    silent, speaking, picker_port = free_ports(3)
    speed = ["--prefill-tokens-per-s", "100000"]
    servers = [Server(silent, *speed), Server(speaking, *speed, "--events")]
    envoy = None
    sources = [
        {"url": f"http://127.0.0.1:{silent}", "events": []},
        {"url": f"http://127.0.0.1:{speaking}", "events": [f"tcp://*:{speaking + 1000}"]},
    ]
    options = ("epp", "--grpc-port", str(picker_port))
    fleet = AttachedFleet(folder, sources, options=options, served_model_name=SMOL)
    try:
        fleet.wait_ready()
        envoy = Envoy(folder, picker_port, [server.port for server in servers])
        yield Rig(envoy, fleet, servers, picker_port)
    finally:
        if envoy is not None:
            envoy.close()
        fleet.close()
        for server in servers:
            server.kill()


@pytest.fixture
def rig(started: Rig) -> Rig:
    """All servers are ready."""
    wait_for(started.all_ready, 20)
    return started


@pytest.mark.parametrize("buffered", [False, True])
def test_a_prefix_goes_to_its_server_and_others_spread(rig: Rig, buffered: bool) -> None:
    """Prompts of 8,000 tokens, as ids; every other one with a salt of the client."""
    prompts = [(tokens(8000), {"cache_salt": f"salt {n}"} if n % 2 else {}) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        firsts = list(pool.map(lambda one: rig.ask(one[0], buffered, **one[1]), prompts))
    servers = [upstream(first) for first in firsts]
    assert [cached(first) for first in firsts] == [0] * 6
    assert Counter(servers) == {server.name: 3 for server in rig.servers}
    time.sleep(3.5)  # beyond what is only expected of a placement
    local = "baton_prefix_tokens_total"
    before = rig.metric(local, source="local")
    for server, (prompt, salt) in zip(servers, prompts, strict=True):
        again = rig.ask([*prompt, *tokens(40)], buffered, **salt)
        assert upstream(again) == server
        assert cached(again) == 8000
    wait_for(lambda: rig.metric(local, source="local") == before + 6 * 8000, 3)


def test_texts_of_all_apis_are_rendered_to_find_their_prefix(rig: Rig) -> None:
    """The first turn is sent to the server without events; Baton chooses for the next ones."""
    fields = {"chat/completions": "messages", "messages": "messages", "responses": "input"}
    fields["completions"] = "prompt"
    story = "The lighthouse stands at the end of the world. " * 100

    def ask(path: str, *texts: str, **headers: str) -> str:
        turns = [
            {"role": ("user", "assistant")[n % 2], "content": text}
            for n, text in enumerate((f"{path} {story}", *texts))
        ]
        asked = "".join(turn["content"] for turn in turns) if path == "completions" else turns
        body = {"model": SMOL, fields[path]: asked, "max_tokens": 2, "max_output_tokens": 2}
        return upstream(post(f"{rig.envoy.streamed}/v1/{path}", json=body, headers=headers))

    for path in fields:
        assert ask(path, **{SUBSET_HEADER: rig.silent.name}) == rig.silent.name
    time.sleep(3.5)
    for path in fields:
        for again in ("And then?", "And now?"):
            assert ask(path, "Yes.", again) == rig.silent.name, path


def test_running_responses_count_from_the_choice_to_their_end(rig: Rig) -> None:
    """Ten, one after another: reports of workers, which do not show them, come in between."""
    with contextlib.ExitStack() as stack:
        servers = []
        reading = []  # an iterator that is dropped closes its stream
        for _ in range(10):
            stream = stack.enter_context(open_stream(rig, 600))
            reading.append(stream.iter_lines())
            next(reading[-1])
            servers.append(stream.headers["x-upstream"])
            time.sleep(0.25)
    assert all(servers[n] != servers[n + 1] for n in range(0, 10, 2)), servers


@contextlib.contextmanager
def open_stream(rig: Rig, count: int, only: Server | None = None) -> Iterator[httpx.Response]:
    body = {"model": SMOL, "prompt": tokens(64), "max_tokens": count, "stream": True}
    headers = {SUBSET_HEADER: only.name} if only is not None else {}
    url = f"{rig.envoy.streamed}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, trust_env=False) as stream:
        assert stream.status_code == 200, stream.read()
        yield stream


def test_a_stream_comes_as_the_server_sends_it(rig: Rig) -> None:
    with open_stream(rig, 100) as stream:
        arrivals = [time.monotonic() for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(arrivals) == 101  # with the usage
    assert arrivals[-1] - arrivals[0] > 0.4  # nothing is held back


def test_a_client_that_leaves_takes_its_load_along(rig: Rig) -> None:
    def ended() -> float:
        return rig.metric("baton_requests_total", endpoint="picker")

    before = ended()
    with contextlib.ExitStack() as stack:
        for _ in range(16):  # ten seconds each
            stack.enter_context(open_stream(rig, 2000, rig.silent))
        assert upstream(rig.ask(tokens(32))) == rig.speaking.name
    wait_for(lambda: ended() >= before + 17, 3)
    # the first ones go to the other server, which had fewer
    chosen = {upstream(rig.ask(tokens(32))) for _ in range(40)}
    assert chosen == {server.name for server in rig.servers}


@pytest.mark.costly
def test_several_pickers_see_each_others_load(rig: Rig, tmp_path: Path) -> None:
    """Eight long responses of one at a server; a second picker chooses the other server."""
    [port] = free_ports(1)
    options = ("epp", "--grpc-port", str(port))
    sources = [{"url": f"http://{server.name}", "events": []} for server in rig.servers]
    more = AttachedFleet(tmp_path, sources, options=options, served_model_name=SMOL)
    envoy = None
    try:
        more.wait_ready()
        envoy = Envoy(tmp_path, port, [server.port for server in rig.servers])
        wait_for(lambda: more.ready() == {server.name for server in rig.servers}, 20)
        with contextlib.ExitStack() as stack:
            for _ in range(8):  # ten seconds each
                stack.enter_context(open_stream(rig, 2000, rig.silent))
            wait_for(lambda: more.workers()[rig.silent.name]["running"] == 8, 10)
            url = f"{envoy.streamed}/v1/completions"
            chosen = [upstream(post(url, json=completion(tokens(64)))) for _ in range(6)]
            assert chosen == [rig.speaking.name] * 6
            assert rig.fleet.workers()[rig.silent.name]["running"] == 0  # its own are booked
        wait_for(lambda: more.workers()[rig.silent.name]["running"] == 0, 10)
    finally:
        if envoy is not None:
            envoy.close()
        more.close()


def test_the_usage_corrects_what_is_known_of_a_server_without_events(rig: Rig) -> None:
    """Others have displaced both prompts from the server's cache; only one is asked again."""
    old, newer = tokens(8000), tokens(8000)
    only = {SUBSET_HEADER: rig.silent.name}
    url = f"{rig.envoy.streamed}/v1/completions"
    for prompt in (old, newer):
        assert cached(post(url, json=completion(prompt), headers=only)) == 0
    time.sleep(3.5)
    for _ in range(5):
        post(f"http://{rig.silent.name}/v1/completions", json=completion(tokens(8000)))
    again = rig.ask([*newer, *tokens(40)])
    assert (upstream(again), cached(again)) == (rig.silent.name, 0)
    with open_stream(rig, 1000, rig.silent):
        assert upstream(rig.ask([*old, *tokens(40)])) == rig.speaking.name
        assert upstream(rig.ask([*newer, *tokens(40)])) == rig.silent.name


def completion(prompt: list[int]) -> dict[str, Any]:
    return {"model": SMOL, "prompt": prompt, "max_tokens": 2}


def test_a_subset_limits_the_choice(rig: Rig) -> None:
    url = f"{rig.envoy.streamed}/v1/completions"

    def within(subset: str) -> httpx.Response:
        return post(url, json=completion(tokens(40)), headers={SUBSET_HEADER: subset})

    for server in rig.servers:
        chosen = {upstream(within(f"10.1.1.1:80, {server.name}")) for _ in range(4)}
        assert chosen == {server.name}
    assert {upstream(within("127.0.0.1")) for _ in range(8)} <= {s.name for s in rig.servers}
    wrong = within("10.1.1.1:80")
    assert wrong.status_code == 503
    assert wrong.headers["retry-after"] == "1"
    error = wrong.json()["error"]
    assert error["code"] == "unavailable"
    assert "none of the 1 endpoints in x-gateway-destination-endpoint-subset" in error["message"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"<html>", 400, "invalid_request"),
        (b"[1, 2]", 400, "invalid_request"),
        (b'{"model": 3, "prompt": "a"}', 400, "invalid_request"),
        (b"\xff\xfe{\x00", 400, "invalid_request"),
        (b"[" * 100_000, 400, "invalid_request"),
        (b'{"model": "other", "prompt": "a"}', 404, "model_not_found"),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413, "payload_too_large"),
    ],
)
@pytest.mark.parametrize("buffered", [False, True])
def test_garbage_is_refused_before_a_server_sees_it(
    rig: Rig, content: bytes, status: int, code: str, buffered: bool
) -> None:
    url = rig.envoy.buffered if buffered else rig.envoy.streamed
    answer = post(f"{url}/v1/completions", content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == code
    assert "x-upstream" not in answer.headers or not answer.headers["x-upstream"]


def test_what_baton_does_not_know_is_left_to_a_server(rig: Rig) -> None:
    """An error in the form of its API, a path without a body, and a prompt with an image."""
    wrong = post(f"{rig.envoy.streamed}/v1/messages", content=b"{")
    assert wrong.json()["type"] == "error"
    models = httpx.get(f"{rig.envoy.streamed}/v1/models", trust_env=False)
    assert models.json()["data"][0]["id"] == SMOL
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    body = {"model": SMOL, "messages": [{"role": "user", "content": picture}], "max_tokens": 2}
    assert post(f"{rig.envoy.streamed}/v1/chat/completions", json=body).status_code == 200


def test_a_killed_server_gets_no_more_requests_until_it_is_back(rig: Rig) -> None:
    prompts = [tokens(2000) for _ in range(4)]
    for prompt in prompts:
        assert rig.ask(prompt).status_code == 200
    killed, other = rig.servers
    killed.kill()
    wait_for(lambda: rig.fleet.ready() == {other.name}, 10)
    assert {upstream(rig.ask(prompt)) for prompt in prompts} == {other.name}
    assert health(rig) == "SERVING"
    other.kill()
    wait_for(lambda: health(rig) == "NOT_SERVING", 10)
    refused = rig.ask(prompts[0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    for server in rig.servers:
        server.start()
    wait_for(rig.all_ready, 20)
    wait_for(lambda: health(rig) == "SERVING", 5)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(rig.ask, prompts))
    assert Counter(map(upstream, answers)) == {server.name: 2 for server in rig.servers}


def health(rig: Rig) -> str:
    (authority,) = rig.fleet.folder.rglob("picker/ca.pem")
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{rig.picker_port}", credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        status = stub.Check(request, timeout=5, wait_for_ready=True).status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def test_gateway_and_picker_may_be_restarted(rig: Rig) -> None:
    prompt = tokens(4000)
    server = upstream(rig.ask(prompt))
    rig.envoy.stop()
    rig.envoy.start()
    time.sleep(3.5)
    again = rig.ask(prompt)
    assert (upstream(again), cached(again) > 3000) == (server, True)
    children = psutil.Process(rig.fleet.served.process.pid).children()
    (router,) = (child.pid for child in children if "router" in child.cmdline())
    os.kill(router, signal.SIGKILL)
    wait_for(lambda: rig.ask(prompt).status_code == 200, 30)
    wait_for(rig.all_ready, 20)
    prompt = tokens(4000)
    with open_stream(rig, 1000, rig.silent):
        assert upstream(rig.ask(prompt)) == rig.speaking.name
    time.sleep(2)
    with open_stream(rig, 1000, rig.speaking):  # its events are known again
        assert upstream(rig.ask(prompt)) == rig.speaking.name


@pytest.mark.costly
def test_a_stop_lets_streams_end_and_takes_no_more(rig: Rig) -> None:
    """It is the last test: nothing picks afterwards."""
    with open_stream(rig, 400) as stream:
        lines = stream.iter_lines()
        next(lines)
        rig.fleet.served.process.terminate()
        time.sleep(0.5)
        assert rig.fleet.served.process.poll() is None
        assert sum(line.startswith("data: {") for line in lines) == 400
    assert rig.fleet.served.process.wait(15) == 0
    assert rig.ask(tokens(40)).status_code == 500
