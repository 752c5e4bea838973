"""Attached llama-servers: real ones, with the model whose tokenizer the router has."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.text.tokenizer import load_tokenizer
from benchmarks.llamacpp import Peer, PeerError, cache_folder
from tests.e2e.fleet_processes import free_port
from tests.fleet.attached.envoy import Envoy
from tests.fleet.attached.rig import MODEL, AttachedFleet, Background
from tests.fleet.test_up import wait_for
from tests.registry.redis_servers import free_ports

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]
LONG = "List of animals: cat, dog, cow, pig, hen, fox, bee, ant, owl, bat, rat, elk, " * 4


class LlamaServer:
    """One llama-server with two slots."""

    def __init__(self, peer: Peer, model: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [peer.programs / "llama-server", "-m", model, "--port", self.port]
        command += ["-t", 1, "-np", 2, "-c", 8192]
        self.process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, **peer.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call the server itself."""
        with httpx.Client(trust_env=False, timeout=60) as client:
            if body is None:
                return client.get(self.url + path).json()
            return client.post(self.url + path, json=body).json()

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + "/health", trust_env=False).status_code == 200
        return False

    @property
    def busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in self.call("/slots"))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair(NamedTuple):
    """Two servers and their fleet."""

    fleet: AttachedFleet
    servers: list[LlamaServer]


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def peer() -> Peer:
    try:
        return Peer(cache_folder())
    except PeerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pair(peer: Peer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    servers = [LlamaServer(peer, model) for _ in range(2)]
    fleet = None
    try:
        wait_for(lambda: all(server.is_healthy() for server in servers), 60)
        folder = tmp_path_factory.mktemp("llama")
        fleet = AttachedFleet(folder, [server.url for server in servers], "llama-server")
        fleet.wait_ready()
        wait_for(lambda: len(fleet.ready()) == 2, 30)
        yield Pair(fleet, servers)
    finally:
        if fleet is not None:
            fleet.close()
        for server in servers:
            server.stop()


def post(pair: Pair, path: str, **body: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **body}
    return httpx.post(pair.fleet.url + path, json=body, trust_env=False, timeout=120)


def completion(pair: Pair, **body: Any) -> dict[str, Any]:
    answer = post(pair, "/v1/completions", return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_is_answered_and_its_prefix_is_cached(pair: Pair) -> None:
    question = {"role": "user", "content": "What is the capital of France?" + " " + LONG}
    answers = [
        post(pair, "/v1/chat/completions", messages=[question], max_tokens=12).json()
        for _ in range(2)
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (
        cached > answers[1]["usage"]["prompt_tokens"] - 17
    )  # whole blocks, without the last token


def test_a_chat_is_answered_as_by_the_server_itself(pair: Pair) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"messages": [question], "max_tokens": 8}  # near ties differ with a cached prefix
    answer = post(pair, "/v1/chat/completions", **body).json()["choices"][0]
    alone = {**body, "temperature": 0, "cache_prompt": False}
    expected = pair.servers[0].call("/v1/chat/completions", alone)["choices"][0]
    assert answer["message"]["content"] == expected["message"]["content"]
    assert answer["finish_reason"] == expected["finish_reason"]


def test_tokens_within_characters_are_found_again(pair: Pair) -> None:
    """llama-server streams no event for a token that ends within a character."""
    prompt = "Repeat: 🍊🍊🍊 日本. Answer: 🍊🍊🍊 日本. Repeat: 🍊🍊🍊 日本. Answer:"
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer)
    body = {"prompt": tokenizer.encode(prompt), "n_predict": 14, "temperature": 0}
    whole = pair.servers[0].call("/completion", {**body, "return_tokens": True})
    answer = completion(pair, prompt=prompt, max_tokens=14)["choices"][0]
    assert answer["token_ids"] == whole["tokens"]
    assert answer["text"] == whole["content"]
    assert "🍊" in answer["text"]


def test_logprobs_are_the_servers(pair: Pair) -> None:
    answer = completion(pair, prompt="The capital of France is", max_tokens=4, logprobs=3)
    shown = answer["choices"][0]["logprobs"]
    assert len(shown["token_logprobs"]) == 4
    for own, top in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert len(top) == 3
        assert own == max(top.values()) <= 0


def test_a_seed_gives_equal_tokens(pair: Pair) -> None:
    def drawn(seed: int) -> list[int]:
        body = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.0, "seed": seed}
        return completion(pair, **body)["choices"][0]["token_ids"]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_formats_are_schemas_and_choices_and_others_are_refused(pair: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    question = [{"role": "user", "content": "Give me JSON."}]
    call = {"messages": question, "max_tokens": 60}
    answer = post(pair, "/v1/chat/completions", **call, response_format=wanted).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"n", "ok"}
    answer = post(pair, "/v1/chat/completions", **call, guided_choice=["red", "blue"]).json()
    assert answer["choices"][0]["message"]["content"] in ("red", "blue")
    refused = post(pair, "/v1/chat/completions", **call, guided_regex="[a-z]+")
    assert refused.status_code == 400
    assert "llama-server" in refused.json()["error"]["message"]
    for field in ({"presence_penalty": 0.5}, {"min_tokens": 3}):
        refused = post(pair, "/v1/completions", prompt="hi", max_tokens=2, **field)
        assert (refused.status_code, next(iter(field)) in refused.text) == (400, True)


def test_a_stop_token_of_the_client_ends_the_response_and_frees_the_slot(pair: Pair) -> None:
    whole = completion(pair, prompt="1, 2, 3, 4,", max_tokens=40)["choices"][0]["token_ids"]
    stop = whole[5]
    expected = whole[: whole.index(stop)]
    answer = completion(pair, prompt="1, 2, 3, 4,", max_tokens=40, stop_token_ids=[stop])
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: not any(server.busy_slots for server in pair.servers), 20)


def test_a_client_that_leaves_frees_the_slot(pair: Pair) -> None:
    body = {"model": MODEL, "prompt": "Count: 1,", "max_tokens": 3000, "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{pair.fleet.url}/v1/completions", json=body) as stream,
    ):
        next(stream.iter_lines())
        wait_for(lambda: any(server.busy_slots for server in pair.servers), 20)
    wait_for(lambda: not any(server.busy_slots for server in pair.servers), 20)


@pytest.mark.costly
def test_tenants_that_share_no_cache_use_none(pair: Pair, tmp_path: Path) -> None:
    """Another fleet with one of the servers, whose cache is not empty."""
    keys = {"key-of-a": {"tenant": "a"}, "key-of-b": {"tenant": "b"}}
    fleet = AttachedFleet(tmp_path, [pair.servers[0].url], "llama-server", api_keys=keys)
    try:
        fleet.wait_ready()

        def cached(key: str) -> int:
            answer = httpx.post(
                f"{fleet.url}/v1/completions",
                json={"model": MODEL, "prompt": LONG[:160], "max_tokens": 2},
                headers={"authorization": f"Bearer {key}"},
                trust_env=False,
                timeout=60,
            ).json()
            details = answer["usage"]["prompt_tokens_details"]
            return 0 if details is None else int(details["cached_tokens"])

        assert cached("key-of-a") == 0
        assert cached("key-of-a") > 30
        assert [cached("key-of-b"), cached("key-of-b"), cached("key-of-a")] == [0, 0, 0]
    finally:
        fleet.close()


@pytest.mark.costly
def test_a_gateway_sends_turns_where_their_prefix_is_cached(pair: Pair, tmp_path: Path) -> None:
    """`baton epp` and Envoy in front of the same servers: four stories, then their next turns."""
    [picker_port] = free_ports(1)
    urls = [server.url for server in pair.servers]
    options = ("epp", "--grpc-port", str(picker_port))
    picker = AttachedFleet(tmp_path, urls, "llama-server", options=options)
    envoy = None

    def ask(story: int, question: str) -> tuple[str, int]:
        text = f"Story {story}. {LONG} {question}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        url = f"{envoy.streamed}/v1/chat/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=120)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-upstream"], cached

    try:
        picker.wait_ready()
        envoy = Envoy(tmp_path, picker_port, [server.port for server in pair.servers])
        with ThreadPoolExecutor(2) as pool:
            firsts = list(pool.map(lambda story: ask(story, "Why?"), range(4)))
        time.sleep(3.5)  # beyond what is only expected of a placement
        for story, (server, _) in enumerate(firsts):
            again, cached = ask(story, "And then?")
            assert (again, cached > 100) == (server, True), (story, firsts)
        assert len({server for server, _ in firsts}) == 2
    finally:
        if envoy is not None:
            envoy.close()
        picker.close()


def test_a_response_goes_on_when_its_server_is_killed(pair: Pair) -> None:
    """The last test: its server does not come back."""
    body = {"prompt": "Count: 1, 2, 3, 4, 5,", "max_tokens": 150, "ignore_eos": True}
    expected = completion(pair, **body)["choices"][0]["text"]
    response = Background(lambda: completion(pair, **body)["choices"][0]["text"])
    wait_for(lambda: any(server.busy_slots for server in pair.servers), 10)
    time.sleep(0.3)
    next(server for server in pair.servers if server.busy_slots).process.kill()
    text = response.result()
    assert len(re.findall(r"\d+", text)) > 20
    assert text[:100] == expected[:100]
    wait_for(lambda: len(pair.fleet.ready()) == 1, 15)
