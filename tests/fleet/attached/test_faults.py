"""Faults of attached servers: no wrong token, no request without an end, no failed request.

The servers are real HTTP servers that speak vLLM's protocol, as a real one cannot be made to fail
so. ``tests/vllm/test_attached.py`` has the same path with real servers.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.emulated_vllm import Emulation
from fleet.local import state as fleet_state
from router.routing.placement.cost import PREFILL_OVERHEAD_S
from tests.fleet.attached.rig import (
    MODEL,
    PROMPT,
    AttachedFleet,
    Background,
    Emulated,
    ServerThread,
    expected,
)
from tests.fleet.test_up import wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
CONTEXT = 20_000  # more than the model's files say
LIKE = Emulation(model=MODEL, root=f"/models/{MODEL}", token_s=0.02, max_model_len=CONTEXT)


class Pair(NamedTuple):
    """Two servers and their fleet."""

    fleet: AttachedFleet
    servers: list[Emulated]
    thread: ServerThread


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    thread = ServerThread()
    servers = [thread.start(replace(LIKE)) for _ in range(2)]
    urls = [one.url for one in servers]
    fleet = AttachedFleet(tmp_path_factory.mktemp("attached"), urls, max_context_tokens=CONTEXT)
    try:
        fleet.wait_ready()
        yield Pair(fleet, servers, thread)
    finally:
        fleet.close()
        thread.close()


@pytest.fixture
def pair(both: Pair) -> Iterator[Pair]:
    """Both servers, well and ready."""
    both.fleet.wait_for_servers(*both.servers)
    for server in both.servers:
        server.bodies.clear()
    yield both
    for server in both.servers:
        server.emulation.fault = ""


def asked(server: Emulated) -> list[dict[str, Any]]:
    """Return the requests of clients at a server, without those that check it."""
    return [body for body in server.bodies if len(body["token_ids"]) >= len(PROMPT)]


def busy(pair: Pair) -> Emulated:
    """Return the server that has sent some tokens of the only response."""
    wait_for(lambda: any(asked(one) for one in pair.servers), 10)
    server = next(one for one in pair.servers if asked(one))
    before = server.sent
    wait_for(lambda: server.sent > before + 3, 10)
    return server


def test_usage_has_the_cached_tokens_of_the_server_not_the_expected_ones(pair: Pair) -> None:
    """The servers have no KV events, so that Baton does not see an eviction."""
    prompt = list(range(2000, 5000))  # of 0.15 s: it is worth its place
    counts = [cached_tokens(pair, prompt) for _ in range(2)]
    for server in pair.servers:
        server.evict()
    assert [*counts, cached_tokens(pair, prompt, n=2)] == [0, 2976, 0]
    for server in pair.servers:
        server.evict()
    assert cached_tokens(pair, prompt, stream=True, stream_options={"include_usage": True}) == 0


def cached_tokens(pair: Pair, prompt: list[int], **more: Any) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
    url = f"{pair.fleet.url}/v1/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=90)
    assert answer.status_code == 200, answer.text
    (counted,) = re.findall(r'"cached_tokens":(\d+)', answer.text)
    return int(counted)


FAULTS = ["hang", "stall", "garbage", "cut", "foreign"]


def queues(pair: Pair, number: int) -> list[float]:
    """Return the tokens that a request expects before it at each server, the most first."""
    prompt = list(range(number, number + 200))
    response = pair.fleet.respond(1, prompt)
    url = f"{pair.fleet.url}/fleet/requests/{response['id']}"
    report = httpx.get(url, trust_env=False, timeout=10).json()
    counts = []
    for candidate in report["candidates"]:
        terms = candidate["terms"]
        token_s = (terms["compute_s"] - PREFILL_OVERHEAD_S) / len(prompt)
        counts.append(terms["queue_s"] / token_s)
    return sorted(counts, reverse=True)


def counts_once(pair: Pair, readings: list[list[float]]) -> bool:
    """Return whether one server has 6,000 tokens before a request, and the other one none.

    Within 0.25 s, a report may count the prompt and the router as well.
    """
    readings.append(queues(pair, 20_000 + 200 * len(readings)))
    most, least = readings[-1]
    return 5400 < most < 6600 and least < 300


def bodies(pair: Pair) -> list[dict[str, Any]]:
    return [body for server in pair.servers for body in asked(server)]


def test_a_prompt_counts_once_while_it_is_computed_and_not_afterwards(pair: Pair) -> None:
    """It counted twice until its first token, and once more until the next report."""
    for server in pair.servers:
        server.emulation.prefill_tokens_per_s = 2000
    try:
        for number in range(6):  # so that the speed is known
            pair.fleet.complete(1, list(range(1000 * number, 1000 * number + 300)))
        prompt = list(range(10_000, 16_000))
        long = Background(lambda: pair.fleet.complete(1, prompt))
        wait_for(lambda: any(prompt == body["token_ids"] for body in bodies(pair)), 10)
        readings: list[list[float]] = []
        try:
            wait_for(lambda: counts_once(pair, readings), 2.5)  # of the 3 s that the prompt takes
        finally:
            long.result()
        assert queues(pair, 30_000)[0] < 300
    finally:
        for server in pair.servers:
            server.emulation.prefill_tokens_per_s = LIKE.prefill_tokens_per_s


@pytest.mark.parametrize("fault", FAULTS)
def test_a_response_goes_on_at_another_server_with_equal_tokens(pair: Pair, fault: str) -> None:
    response = Background(lambda: pair.fleet.complete(60))
    server = busy(pair)
    server.emulation.fault = fault
    began_s = time.monotonic()
    assert response.result() == expected(60)
    assert time.monotonic() - began_s < 20  # 9 to 10 s on a quiet machine, if only tokens stop
    other = next(one for one in pair.servers if one is not server)
    (resumed,) = asked(other)
    assert len(resumed["token_ids"]) > len(PROMPT)  # behind what the first server has sent


def test_a_request_that_a_proxy_holds_while_the_server_works_is_resumed(pair: Pair) -> None:
    for server in pair.servers:
        server.emulation.fault = "hold"
    held = Background(lambda: pair.fleet.complete(4))
    wait_for(lambda: any(not one.emulation.fault for one in pair.servers), 10)
    for server in pair.servers:
        server.emulation.fault = ""
    prompts = [[number, *range(500, 540)] for number in range(6)]
    others = [Background(lambda p=p: pair.fleet.complete(1500, p)) for p in prompts]
    try:
        assert held.result() == expected(4)
        assert time.monotonic() - held.began_s < 25  # the others take longer
    finally:
        for server in pair.servers:
            server.emulation.token_s = 0.001
        for prompt, other in zip(prompts, others, strict=True):
            assert other.result() == expected(1500, prompt)
        for server in pair.servers:
            server.emulation.token_s = LIKE.token_s


@pytest.mark.parametrize("fault", ["500", "flood"])
def test_an_error_of_a_server_is_no_error_of_the_client(pair: Pair, fault: str) -> None:
    pair.servers[0].emulation.fault = fault
    for number in range(8):
        prompt = [number, *range(300, 340)]
        assert pair.fleet.complete(4, prompt) == expected(4, prompt)


def test_a_server_that_refuses_a_probe_under_load_goes_on_with_its_responses(pair: Pair) -> None:
    """One refused probe, such as by 429 of a proxy, ended the worker and all its streams."""
    prompts = [[number, *range(600, 720)] for number in range(6)]
    for one in [Background(lambda p=p: pair.fleet.complete(20, p)) for p in prompts]:
        one.result()
    assert all(asked(one) for one in pair.servers)  # so none has failures in a row
    for one in pair.servers:
        one.bodies.clear()
    response = Background(lambda: pair.fleet.complete(600))
    server = busy(pair)
    server.emulation.fault = "500"
    assert response.result() == expected(600)
    assert time.monotonic() - response.began_s > 11  # longer than the time between two probes
    (other,) = (one for one in pair.servers if one is not server)
    assert asked(other) == []


def test_attached_servers_are_not_put_to_sleep(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(pair.fleet.folder))
    state = fleet_state.load("attached")
    assert state is not None
    operator = {"authorization": f"Bearer {state.fleet_token}"}
    for path in ("/sleep", "/wake_up"):
        refused = httpx.post(f"{pair.fleet.url}{path}", headers=operator, trust_env=False)
        assert refused.status_code == 400
        assert "attached servers" in refused.json()["error"]["message"]
    shown = httpx.get(f"{pair.fleet.url}/is_sleeping", trust_env=False)
    assert shown.json() == {"is_sleeping": False}


def test_the_context_is_that_of_the_servers(pair: Pair) -> None:
    prompt = list(range(1000, 11_000))
    assert pair.fleet.complete(4, prompt) == expected(4, prompt)


def test_a_slow_server_is_not_given_up(pair: Pair) -> None:
    for server in pair.servers:
        server.emulation.token_s = 1.2  # longer than a look at its health
    try:
        assert pair.fleet.complete(4) == expected(4)
        assert sum(len(asked(one)) for one in pair.servers) == 1
    finally:
        for server in pair.servers:
            server.emulation.token_s = LIKE.token_s


@pytest.mark.parametrize(("answer_s", "least"), [(0.7, 2), (4.0, 1)])
def test_servers_that_all_answer_slowly_take_requests_all_the_time(
    pair: Pair, answer_s: float, least: int
) -> None:
    """Both are on one busy machine. They counted as hung at once, and requests got 503."""
    for server in pair.servers:
        server.emulation.answer_s = answer_s
    try:
        until_s = time.monotonic() + 14  # the fifth look reads all properties
        while time.monotonic() < until_s:
            assert len(pair.fleet.ready()) >= least
            time.sleep(0.2)
        assert pair.fleet.complete(4) == expected(4)
    finally:
        for server in pair.servers:
            server.emulation.answer_s = 0.0


def test_a_response_that_the_server_does_not_end_has_the_tokens_that_were_asked(
    pair: Pair,
) -> None:
    for server in pair.servers:
        server.emulation.fault = "endless"
    assert pair.fleet.complete(8) == expected(8)
    wait_for(lambda: not any(one.running for one in pair.servers), 10)


def test_a_server_that_changes_its_model_gets_no_request(pair: Pair) -> None:
    changed = pair.servers[0]
    changed.emulation.model = changed.emulation.root = "another"
    try:
        for number in range(8):
            prompt = [number, *range(400, 440)]
            assert pair.fleet.complete(4, prompt) == expected(4, prompt)
        pair.fleet.wait_for_servers(pair.servers[1])
        assert changed.bodies == []
        wait_for(lambda: "serves another" in pair.fleet.served.output.read_text(), 10)
    finally:
        changed.emulation.model = MODEL
        changed.emulation.root = LIKE.root
    pair.fleet.wait_for_servers(*pair.servers)


def test_a_server_that_was_replaced_begins_another_life(pair: Pair) -> None:
    """Its cache is empty, so the index must not lead requests to it."""
    pair.fleet.complete(4)
    before = {name: one["incarnation"] for name, one in pair.fleet.workers().items()}
    pair.servers[0].emulation.started += 1.0
    name = pair.servers[0].url.removeprefix("http://")
    wait_for(lambda: pair.fleet.workers()[name]["incarnation"] != before[name], 20)
    pair.fleet.wait_for_servers(*pair.servers)
    assert pair.fleet.complete(4) == expected(4)


def test_a_dead_server_leaves_and_comes_back(pair: Pair) -> None:
    dead = pair.servers[0]
    port = dead.port
    response = Background(lambda: pair.fleet.complete(60))
    busy(pair)
    dead.stop()
    assert response.result() == expected(60)
    pair.fleet.wait_for_servers(pair.servers[1])
    pair.servers[0] = pair.thread.start(replace(LIKE), port)
    pair.fleet.wait_for_servers(*pair.servers, limit_s=10)


def test_requests_of_other_clients_at_a_server_are_part_of_its_load(pair: Pair) -> None:
    """Eight of them stream from the first server; those of the fleet go to the second one."""
    crowded, free = pair.servers
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    call = {"json": body, "trust_env": False, "timeout": 60}
    others = [
        Background(lambda: httpx.post(f"{crowded.url}/v1/completions", **call)) for _ in range(8)
    ]
    wait_for(lambda: crowded.running == 8, 10)
    host = crowded.url.removeprefix("http://")
    wait_for(lambda: pair.fleet.workers()[host]["running"] == 8, 10)
    for server in pair.servers:
        server.bodies.clear()
    for number in range(6):
        pair.fleet.complete(4, [number + 3, *PROMPT])
    assert (len(asked(crowded)), len(asked(free))) == (0, 6)
    for each in others:
        assert each.result().status_code == 200
    wait_for(lambda: pair.fleet.workers()[host]["running"] == 0, 10)


def test_all_servers_dead_is_an_error_with_a_status(pair: Pair) -> None:
    for server in pair.servers:
        server.emulation.fault = "500"
    with pytest.raises(AssertionError, match="unavailable"):
        pair.fleet.complete(4)
