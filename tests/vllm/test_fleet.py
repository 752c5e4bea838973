"""A fleet of two real vLLM workers (`make test-vllm`), on this machine's CPU.

The tests that kill a process are spread: its worker starts again during the tests behind.
"""

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm import protocol
from baton.engine.vllm.interpreter import vllm_version
from baton.types.params import SamplingParams
from tests.fleet.test_up import Served, wait_for
from tests.vllm.places import ARGS, MODEL, PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
READY_S = 400.0
STORY = "The history of the lighthouse at the end of the world begins with a storm. " * 12
CONFIG = f"""
fleet: vllm
model: {MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
api_keys:
  key-of-tenant-a: a
  key-of-tenant-b: b
  key-of-tenant-operator: {{tenant: operator, role: operator}}
pools:
  prefill: 0
  decode: 2
  engine: vllm
  vllm: {{python: {PYTHON}, args: {json.dumps(ARGS)}}}
"""


class Fleet:
    """A running fleet, its processes and its clients."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self, tenant: str = "a") -> httpx.Client:
        headers = {"authorization": f"Bearer key-of-tenant-{tenant}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300, trust_env=False)

    def ask(self, text: str, tenant: str = "a", **more: Any) -> httpx.Response:
        body = {"model": "smol", "messages": [{"role": "user", "content": text}], **more}
        with self.client(tenant) as client:
            return client.post("/v1/chat/completions", json={"temperature": 0, **body})

    def workers(self) -> list[dict[str, Any]]:
        with self.client("operator") as client:
            return client.get("/fleet").json()["workers"]

    def ready(self) -> list[dict[str, Any]]:
        return [one for one in self.workers() if one["state"] == "ready"]

    def is_at_rest(self) -> bool:
        return all(one["kv_blocks"]["leased"] == 0 == one["running"] for one in self.workers())

    def wait_until_all_are_ready(self) -> None:
        wait_for(lambda: len(self.ready()) == 2, READY_S)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm")
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, CONFIG)
    try:
        fleet = Fleet(served.wait_ready(READY_S))
        assert vllm_processes(folder)
        yield fleet
    finally:
        served.process.terminate()
        served.process.wait(60)
    wait_for(lambda: not vllm_processes(folder), 20)


def sockets(fleet: Fleet) -> dict[str, str]:
    """Return the sockets of the vLLMs of ready workers."""
    lines = {one["id"]: psutil.Process(one["pid"]).cmdline() for one in fleet.ready()}
    return {name: line[line.index("--uds") + 1] for name, line in lines.items()}


def vllm_processes(folder: Path) -> list[psutil.Process]:
    """Return the servers of vLLM that workers of a fleet have started, which is in ``folder``."""
    return [
        one
        for one in psutil.process_iter(["cmdline", "environ"])
        if "/baton-vllm-" in " ".join(one.info["cmdline"] or ())
        and (one.info["environ"] or {}).get("BATON_HOME") == str(folder)
    ]


def test_a_question_is_answered(fleet: Fleet) -> None:
    answer = fleet.ask("What is the capital of France?", max_tokens=30).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    for worker in fleet.workers():
        assert vllm_version(str(PYTHON)).startswith(worker["engine"].removeprefix("vllm "))


def test_a_prefix_goes_to_the_worker_that_has_it_but_not_to_another_tenant(fleet: Fleet) -> None:
    fleet.wait_until_all_are_ready()
    story = f"{uuid.uuid4()} {STORY * 5}"  # of its own, also if the test runs again
    first = fleet.ask(f"{story} 1", max_tokens=2)
    place = first.headers["x-baton-route"].partition("; cached")[0]
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for number in (2, 3):
        wait_for(fleet.is_at_rest, 30)  # work at hand may outweigh a cached prefix
        again = fleet.ask(f"{story} {number}", max_tokens=2)
        assert again.headers["x-baton-route"].partition("; cached")[0] == place
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 900
        assert cached % 32 == 0
    stranger = fleet.ask(f"{story} 1", "b", max_tokens=2)
    assert stranger.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_goes_on_elsewhere_when_a_server_is_killed(fleet: Fleet) -> None:
    check_a_kill(fleet, "server")


def test_the_tokens_are_those_of_vllm_alone(fleet: Fleet) -> None:
    """But for near ties: vLLM's sums depend on the batch, which a probe joins at times."""
    different: list[int] = []
    for number in range(32):
        prompt = list(range(300 + 40 * number, 300 + 40 * number + 20 + 3 * number))
        with fleet.client() as client:
            answer = client.post(
                "/v1/completions",
                json={
                    "model": "smol",
                    "prompt": prompt,
                    "max_tokens": 8,
                    "temperature": 0,
                    "return_token_ids": True,
                },
            )
        worker = answer.headers["x-baton-route"].partition("decode=")[2].partition(";")[0]
        own = asyncio.run(alone(sockets(fleet)[worker], prompt, 8))
        if answer.json()["choices"][0]["token_ids"] != own:
            different.append(number)
    assert len(different) <= 2, different


async def alone(socket: str, prompt: list[int], max_tokens: int = 12) -> list[int]:
    """Return the tokens that vLLM gives without Baton."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=os.urandom(16))
    stream = protocol.ChoiceStream("alone", 0, spec, (2,))
    tokens: list[int] = []

    def take(data: bytes) -> None:
        tokens.extend(token.token for run in stream.feed(data) for token in run.tokens)

    body = protocol.generate_body("alone", prompt, spec, 0, (2,))
    origin = HttpOrigin.of_socket(socket)
    assert await (await origin.begin("POST", protocol.GENERATE, body, take)).done
    return tokens


def test_a_stream_goes_on_elsewhere_when_an_engine_core_is_killed(fleet: Fleet) -> None:
    check_a_kill(fleet, "core")


def test_nothing_is_left_after_many_requests_of_which_half_are_aborted(fleet: Fleet) -> None:
    asyncio.run(load(fleet, 400))
    fleet.wait_until_all_are_ready()
    wait_for(fleet.is_at_rest, 30)
    for socket in sockets(fleet).values():
        wait_for(lambda socket=socket: is_empty(socket), 30)  # but for a probe


def is_empty(socket: str) -> bool:
    """Return whether vLLM has no requests and no KV in use."""
    asyncio.run(alone(socket, [504, 3575], 2))  # its gauges are those of its last step
    page = asyncio.run(HttpOrigin.of_socket(socket).fetch("GET", "/metrics", 30.0)).decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    gauges = tuple(f"vllm:{name}{{" for name in names)
    rows = [row for row in page.splitlines() if row.startswith(gauges)]
    assert len(rows) == len(gauges), rows
    return all(float(row.rpartition(" ")[2]) == 0.0 for row in rows)


async def load(fleet: Fleet, count: int, more_headers: dict[str, str] | None = None) -> None:
    headers = {"authorization": "Bearer key-of-tenant-a", **(more_headers or {})}
    queue = list(range(count))

    async def work(client: httpx.AsyncClient) -> None:
        while queue:
            number = queue.pop()
            body = {"model": "smol", "prompt": f"Number {number} is", "stream": True}
            body |= {"max_tokens": 100 if number % 2 else 4, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, (await answer.aread()).decode()
                async for line in answer.aiter_lines():
                    if number % 2 and line:
                        break  # the client disconnects

    async with httpx.AsyncClient(
        base_url=fleet.url, headers=headers, timeout=300, trust_env=False
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(16)))


def test_a_stream_goes_on_elsewhere_when_an_engine_process_is_killed(fleet: Fleet) -> None:
    check_a_kill(fleet, "process")


def test_a_format_is_kept(fleet: Fleet) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = fleet.ask("Give me a person.", max_tokens=80, response_format=form).json()
    assert "choices" in answer, answer
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_choices_logprobs_and_penalties_arrive(fleet: Fleet) -> None:
    more = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "logit_bias": {"30": -100}}
    answer = fleet.ask("Hello", n=2, max_tokens=8, logprobs=True, top_logprobs=3, **more).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts[0] != texts[1]
    for choice in answer["choices"]:
        assert all(len(one["top_logprobs"]) == 3 for one in choice["logprobs"]["content"])
    again = fleet.ask("Hello", n=2, max_tokens=8, logprobs=True, top_logprobs=3, **more).json()
    assert [choice["message"]["content"] for choice in again["choices"]] == texts


def test_bad_words_are_not_in_the_response(fleet: Fleet) -> None:
    words = {"bad_words": ["Paris", "capital"], "max_tokens": 20}
    answer = fleet.ask("What is the capital of France?", **words).json()
    text = answer["choices"][0]["message"]["content"]
    assert text
    assert "Paris" not in text
    assert "capital" not in text


def test_log_probabilities_of_a_prompt_are_those_of_vllm(fleet: Fleet) -> None:
    """The second time, a part of the prompt is cached."""
    prompt = list(range(1000, 1040))
    params = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 2, "detokenize": False}
    asked = msgspec.json.encode({"token_ids": prompt, "sampling_params": params})
    origin = HttpOrigin.of_socket(next(iter(sockets(fleet).values())))
    raw = asyncio.run(origin.fetch("POST", protocol.GENERATE, 60.0, asked))
    expected = json.loads(raw)["prompt_logprobs"][1:]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 4, "prompt_logprobs": 2}
    for _ in range(2):
        with fleet.client() as client:
            answer = client.post("/v1/completions", json={**body, "temperature": 0}).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        rows = answer["choices"][0]["prompt_logprobs"]
        assert rows[0] is None
        for row, own in zip(rows[1:], expected, strict=True):
            assert row.keys() == own.keys()
            for token, scored in row.items():
                assert scored["rank"] == own[token]["rank"]
                assert scored["logprob"] == pytest.approx(own[token]["logprob"], abs=0.01)


def test_what_vllm_lacks_is_refused_by_name(fleet: Fleet) -> None:
    with fleet.client() as client:
        refused = client.post("/v1/embeddings", json={"model": "smol", "input": "Hi"})
    assert refused.status_code == 400
    assert "not served by vLLM workers" in refused.json()["error"]["message"]


def test_a_stream_goes_on_elsewhere_when_a_shell_is_killed(fleet: Fleet) -> None:
    check_a_kill(fleet, "shell")


def test_a_format_goes_on_elsewhere_where_it_was(fleet: Fleet) -> None:
    digits = "3141592653589793238462643383279502884197169399375105820974944592307816406286"
    text = check_a_kill(fleet, "process", guided_choice=[digits], ignore_eos=False)
    assert digits.startswith(text)


def check_a_kill(fleet: Fleet, victim: str, **more: Any) -> str:
    """Kill a process of the worker that answers a stream, and check that the stream completes.

    Returns:
        The text of its 60 tokens.
    """
    fleet.wait_until_all_are_ready()
    body = {"model": "smol", "prompt": f"A story of the {victim}:", "max_tokens": 60}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    body |= more
    text = ""
    tokens: list[int] = []
    group: list[psutil.Process] = []
    folders = {name: Path(socket).parent for name, socket in sockets(fleet).items()}
    with fleet.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        worker_id = answer.headers["x-baton-route"].partition("decode=")[2].partition(";")[0]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
                text += choice["text"]
            if len(tokens) >= 20 and not group:
                group = kill(fleet, worker_id, victim)
    assert len(tokens) == 60
    wait_until_gone(group)
    wait_for(lambda: not folders[worker_id].exists(), 20)
    return text


def kill(fleet: Fleet, worker_id: str, victim: str) -> list[psutil.Process]:
    """Kill one process of a worker; return the processes of its vLLM."""
    (worker,) = [one for one in fleet.workers() if one["id"] == worker_id]
    server = psutil.Process(worker["pid"])
    process = server.parent()
    assert process is not None
    (core,) = [one for one in server.children() if "EngineCore" in " ".join(one.cmdline())]
    victims = {"server": server, "core": core, "process": process}
    group = [process, server, *server.children(recursive=True)]
    (victims.get(victim) or process.parent()).send_signal(signal.SIGKILL)
    return group


def wait_until_gone(group: list[psutil.Process]) -> None:
    until_s = time.monotonic() + 20
    while left := [one for one in group if alive(one)]:
        assert time.monotonic() < until_s, left
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
