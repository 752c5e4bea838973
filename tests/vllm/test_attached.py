"""A fleet in front of two real vLLM servers that it did not start (`make test-vllm`).

The first server sends KV events, the second one does not.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.metrics_page import read_load
from tests.engine.vllm.record import FRANCE
from tests.fleet.attached.envoy import SUBSET_HEADER, Envoy
from tests.fleet.attached.rig import AttachedFleet
from tests.fleet.test_up import Served, wait_for
from tests.registry.redis_servers import free_ports
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_adapters import write_adapters
from tests.vllm.test_fleet import Fleet, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
READY_S = 300.0
STORY = "The history of the lighthouse at the end of the world begins with a storm. " * 60
CONTEXT = ("--max-model-len", "2048", "--served-model-name", "smol")
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
NEEDED = (
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--enable-force-include-usage",
)


class Server:
    """A vLLM server that Baton has not started."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *more: str,
        variables: Mapping[str, str] | None = None,
        model: Path = MODEL,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._model = model
        self._more = more
        self._variables = variables or {}
        self.start()

    def start(self) -> None:
        command = [str(PYTHON.parent / "vllm"), "serve", str(self._model), "--port", str(self.port)]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            **self._variables,
        }
        with (self._folder / f"{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", *ARGS, *CONTEXT, *self._more],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, (self._folder / f"{self.port}.log").read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def adapters(self) -> int:
        """Return the number of adapters that are loaded, which are models behind the first."""
        page = httpx.get(f"{self.url}/v1/models", trust_env=False).json()
        return len(page["data"]) - 1

    def gauge(self, name: str) -> float:
        page = asyncio.run(HttpOrigin.of_url(self.url).fetch("GET", "/metrics", 30.0)).decode()
        (value,) = re.findall(rf"(?m)^vllm:{name}{{.*}} (\S+)$", page)
        return float(value)


class Attached(NamedTuple):
    """Two servers, the fleet in front of them, and the folder of its LoRA adapters."""

    fleet: Fleet
    events: Server
    silent: Server
    adapters: Path
    streams: tuple[str, str]


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    folder = tmp_path_factory.mktemp("attached")
    first, second, stream, replay = free_ports(4)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{stream}"}
    events["replay_endpoint"] = f"tcp://*:{replay}"
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    servers = [
        Server(folder, second, *NEEDED, *LORA, variables=variables),
        Server(
            folder,
            first,
            *NEEDED,
            *LORA,
            "--kv-events-config",
            json.dumps(events),
            variables=variables,
        ),
    ]
    config = f"""
fleet: attached
model: {MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
api_keys:
  key-of-tenant-a: a
  key-of-tenant-b: b
  key-of-tenant-operator: {{tenant: operator, role: operator}}
adapters: {{folder: {folder}, max_loaded: 2, max_rank: 8}}
pools:
  engine: vllm
  vllm:
    servers:
      - {{url: "http://127.0.0.1:{first}", label: events,
          events: ["tcp://*:{stream}"], replay: ["tcp://*:{replay}"]}}
      - {{url: "http://127.0.0.1:{second}", label: silent}}
"""
    try:
        for server in servers:
            wait_for(server.is_healthy, READY_S)
        served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, config)
        try:
            streams = (f"tcp://*:{stream}", f"tcp://*:{replay}")
            yield Attached(Fleet(served.wait_ready(30)), servers[1], servers[0], folder, streams)
        finally:
            served.process.terminate()
            served.process.wait(60)
        assert all(server.is_healthy() for server in servers)  # they outlive the fleet
    finally:
        for server in servers:
            server.kill()


def worker_of(attached: Attached, label: str) -> str:
    (name,) = [one["id"] for one in attached.fleet.workers() if one["host"] == label]
    return str(name)


def test_a_question_is_answered(attached: Attached) -> None:
    attached.fleet.wait_until_all_are_ready()
    answer = attached.fleet.ask("What is the capital of France?", max_tokens=30).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert {one["engine"] for one in attached.fleet.workers()} == {"vllm 0.32.0"}


@pytest.mark.parametrize("label", ["events", "silent"])
def test_a_prefix_is_found_with_and_without_events_but_not_by_another_tenant(
    attached: Attached, label: str
) -> None:
    """Stories that come at once begin at both servers."""
    fleet = attached.fleet
    fleet.wait_until_all_are_ready()
    worker = worker_of(attached, label)
    stories = [f"{uuid.uuid4()} {STORY}" for _ in range(6)]
    with ThreadPoolExecutor(len(stories)) as pool:
        firsts = list(pool.map(lambda story: fleet.ask(f"{story} 1", max_tokens=2), stories))
    routes = [first.headers["x-baton-route"] for first in firsts]
    at = next(n for n, route in enumerate(routes) if f"decode={worker};" in route)
    story = stories[at]
    assert firsts[at].json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for number in (2, 3):
        wait_for(fleet.is_at_rest, 30)
        again = fleet.ask(f"{story} {number}", max_tokens=2)
        assert f"decode={worker};" in again.headers["x-baton-route"]
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 900
        assert cached % 32 == 0
    stranger = fleet.ask(f"{story} 1", "b", max_tokens=2)
    assert stranger.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_gateway_finds_prefixes_with_and_without_events(
    attached: Attached, tmp_path: Path
) -> None:
    """Behind a real Envoy, with clients' own bodies and without Baton's cache salt."""
    events, replay = attached.streams
    sources = [
        {"url": attached.events.url, "events": [events], "replay": [replay]},
        {"url": attached.silent.url, "events": []},
    ]
    ports = [attached.events.port, attached.silent.port]
    (picker,) = free_ports(1)
    options = ("epp", "--grpc-port", str(picker))
    names = {"model": str(MODEL), "served_model_name": "smol", "max_context_tokens": 2048}
    fleet = AttachedFleet(tmp_path, sources, options=options, **names)
    envoy: Envoy | None = None
    try:
        fleet.wait_ready()
        wait_for(lambda: len(fleet.ready()) == 2, 30)
        envoy = Envoy(tmp_path, picker, ports)
        for port in ports:
            story = f"{uuid.uuid4()} {STORY}"
            first = ask_gateway(envoy, story, f"127.0.0.1:{port}")
            assert first.usage["prompt_tokens_details"]["cached_tokens"] == 0
            time.sleep(4)  # until only what is known of the server counts
            for more in (" And then?", " And now?"):
                again = ask_gateway(envoy, story + more)
                assert again.upstream == f"127.0.0.1:{port}"
                cached = again.usage["prompt_tokens_details"]["cached_tokens"]
                assert cached > 900
                assert cached % 32 == 0
        paris = ask_gateway(envoy, "What is the capital of France?", max_tokens=30)
        assert paris.text == "The capital of France is Paris."
    finally:
        if envoy is not None:
            envoy.close()
        fleet.close()


class Streamed(NamedTuple):
    """A response of a stream through the gateway."""

    upstream: str
    text: str
    usage: dict[str, Any]


def ask_gateway(envoy: Envoy, text: str, subset: str = "", **more: Any) -> Streamed:
    turns = [{"role": "user", "content": text}]
    body = {"model": "smol", "messages": turns, "max_tokens": 4, "temperature": 0, **more}
    headers = {SUBSET_HEADER: subset} if subset else {}
    url = f"{envoy.streamed}/v1/chat/completions"
    sent: dict[str, Any] = {"json": {**body, "stream": True}, "headers": headers}
    with httpx.stream("POST", url, timeout=120, trust_env=False, **sent) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        assert answer.status_code == 200, lines
    chunks = [json.loads(line) for line in lines]
    parts = (choice["delta"].get("content") for one in chunks for choice in one["choices"])
    return Streamed(answer.headers["x-upstream"], "".join(filter(None, parts)), chunks[-1]["usage"])


def test_formats_choices_seeds_and_logprobs_hold(attached: Attached) -> None:
    """With vLLM's default backend of formats, which the servers here have."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = attached.fleet.ask("Give me a person.", max_tokens=80, response_format=form).json()
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 9
    more: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 8}
    more |= {"logprobs": True, "top_logprobs": 3}
    answers = [attached.fleet.ask("Hello", **more).json()["choices"] for _ in range(2)]
    texts = [[choice["message"]["content"] for choice in one] for one in answers]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    for choice in answers[0]:
        assert all(len(one["top_logprobs"]) == 3 for one in choice["logprobs"]["content"])


def test_adapters_are_loaded_at_the_servers_that_get_their_requests(attached: Attached) -> None:
    """Each response begins as that of Baton's own engine; vLLM evicts what it may not hold."""
    fleet = attached.fleet
    fleet.wait_until_all_are_ready()
    expected = write_adapters(attached.adapters, 3)[1:]
    names = [f"adapter-{number}" for number in range(3)]
    with fleet.client("operator") as client:
        for number, name in enumerate(names):
            body = {"lora_name": name, "lora_path": f"{number}"}
            loaded = client.post("/v1/load_lora_adapter", json=body)
            assert loaded.status_code == 200, loaded.text
    prompts = [(name, prompt) for prompt in (FRANCE, *"1234567") for name in names]
    with fleet.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        body = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
        bodies = [{**body, "model": name, "prompt": prompt} for name, prompt in prompts]
        answers = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    firsts = [answer.json()["choices"][0]["token_ids"][0] for answer in answers[:3]]
    assert firsts == [tokens[0] for tokens in expected]
    routes = {answer.headers["x-baton-route"].partition("decode=")[2][:8] for answer in answers}
    wait_for(fleet.is_at_rest, 30)
    for label, server in (("events", attached.events), ("silent", attached.silent)):
        most = 2 if worker_of(attached, label) in routes else 0
        wait_for(lambda most=most, server=server: bool(most) <= server.adapters() <= most, 10)  # type: ignore[misc]


def test_a_deleted_tenant_leaves_no_kv_at_the_servers(attached: Attached) -> None:
    """vLLM can only reset its whole cache, so that the KV of other tenants goes as well."""
    fleet = attached.fleet
    fleet.wait_until_all_are_ready()
    story = f"{uuid.uuid4()} {STORY}"
    assert [cached_tokens(fleet, story, tenant) > 900 for tenant in "abab"] == [False] * 2 + [
        True
    ] * 2
    with fleet.client("operator") as client:
        receipt = client.delete("/fleet/tenants/b", timeout=60).json()
    assert receipt["not_deleted"] == []
    assert receipt["deleted"]["kv_blocks"]["pool"] > 60
    assert [cached_tokens(fleet, story, tenant) for tenant in "ab"] == [0, 0]


def cached_tokens(fleet: Fleet, text: str, tenant: str) -> int:
    wait_for(fleet.is_at_rest, 30)
    usage = fleet.ask(text, tenant, max_tokens=2).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_nothing_is_left_at_the_servers_after_aborted_requests(attached: Attached) -> None:
    asyncio.run(load(attached.fleet, 200))
    wait_for(attached.fleet.is_at_rest, 30)
    for server in (attached.events, attached.silent):
        for name in ("num_requests_running", "num_requests_waiting"):
            wait_for(lambda server=server, name=name: server.gauge(name) == 0.0, 10)  # type: ignore[misc]


def test_requests_of_other_clients_count_as_load_of_their_server(attached: Attached) -> None:
    server = attached.silent
    body = {"model": "smol", "prompt": STORY[:400], "max_tokens": 1000, "ignore_eos": True}

    def reported() -> int:
        (worker,) = [one for one in attached.fleet.workers() if one["host"] == "silent"]
        return int(worker["running"])

    reading = []  # an iterator that is dropped closes its stream
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            call = {"json": {**body, "stream": True}, "trust_env": False, "timeout": 60}
            stream = httpx.stream("POST", f"{server.url}/v1/completions", **call)
            reading.append(stack.enter_context(stream).iter_lines())
            next(reading[-1])
        wait_for(lambda: reported() == 3, 20)
        load = asyncio.run(read_load(HttpOrigin.of_url(server.url)))
        assert (load.running, load.waiting) == (3, 0)
        assert load.prompt_tokens >= load.computed_tokens > 0
    wait_for(lambda: reported() == 0, 20)


def test_a_response_goes_on_when_its_server_is_killed(attached: Attached) -> None:
    fleet = attached.fleet
    fleet.wait_until_all_are_ready()
    whole = complete(fleet)
    body = {"model": "smol", "prompt": "Once upon a time", "max_tokens": 120, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    text = ""
    killed: Server | None = None
    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        worker = answer.headers["x-baton-route"].partition("decode=")[2].partition(";")[0]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if killed is None and len(text) > 60:
                on_events = worker == worker_of(attached, "events")
                killed = attached.events if on_events else attached.silent
                killed.kill()
    assert killed is not None
    assert text[:60] == whole[:60]
    assert answer.status_code == 200
    assert len(text) > 300
    wait_for(lambda: len(fleet.ready()) == 1, 15)
    killed.start()
    wait_for(killed.is_healthy, READY_S)
    wait_for(lambda: len(fleet.ready()) == 2, 5)


def complete(fleet: Fleet) -> str:
    body = {"model": "smol", "prompt": "Once upon a time", "max_tokens": 120, "temperature": 0}
    with fleet.client() as client:
        answer = client.post("/v1/completions", json={**body, "ignore_eos": True})
    return str(answer.json()["choices"][0]["text"])
