"""Data-parallel ranks of an attached server: each has a cache of its own."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import httpx
import pytest

from benchmarks.emulated_vllm import GENERATE, Emulation
from tests.fleet.attached.rig import MODEL, AttachedFleet, Emulated, ServerThread, neighbours
from tests.fleet.test_up import wait_for

RANKS = 4
TURNS = 3
LENGTH = 320  # of a prompt in its first turn


@pytest.fixture(scope="module", params=["events", "no-events"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Emulated, str]]:
    """A server with ranks, and the URL of the fleet before it."""
    port = neighbours(RANKS) if request.param == "events" else 0
    thread = ServerThread()
    emulation = Emulation(model=MODEL, root=MODEL, ranks=RANKS, events_port=port, token_s=0.001)
    one = thread.start(emulation)
    streams = [f"tcp://127.0.0.1:{port + rank}" for rank in range(RANKS)]
    entry = {"url": one.url, "events": streams if port else []}
    fleet = AttachedFleet(tmp_path_factory.mktemp("ranks"), [entry])
    try:
        fleet.wait_ready()
        yield one, fleet.url
    finally:
        fleet.close()
        thread.close()


@pytest.fixture
def server(started: tuple[Emulated, str]) -> Iterator[tuple[Emulated, str]]:
    """The same, as it was at its start but for what the router expects of its caches."""
    one, _ = started
    one.bodies.clear()
    for rank in one.ranks:
        rank.cache.clear()
    before = replace(one.emulation)
    yield started
    for field in fields(before):
        setattr(one.emulation, field.name, getattr(before, field.name))


def converse(url: str, first: int, model: str = MODEL) -> int:
    """Return the cached tokens of a conversation's later turns."""
    prompt = list(range(first, first + LENGTH))
    cached = 0
    for turn in range(TURNS):
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).json()
        cached += turn > 0 and answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        prompt += [*answer["choices"][0]["token_ids"], *range(first, first + 56)]
    return cached


def test_turns_go_to_the_rank_that_has_their_prefix(server: tuple[Emulated, str]) -> None:
    """vLLM alone sends them to the rank with the fewest requests, whatever it has cached."""
    one, url = server
    firsts = [1000 * number for number in range(1, 13)]
    with ThreadPoolExecutor(6) as pool:
        cached = list(pool.map(lambda first: converse(url, first), firsts))
    all_tokens = sum(LENGTH + 64 * turn for turn in range(TURNS - 1)) * len(firsts)
    assert sum(cached) > 0.85 * all_tokens  # a busy rank may lose one to an idle one
    shared = Counter(body["rank"] for body in one.bodies)
    assert set(shared) == set(range(RANKS)), shared
    assert max(shared.values()) <= 2 * len(one.bodies) / RANKS


def test_vllm_alone_spreads_turns(server: tuple[Emulated, str]) -> None:
    """So the emulated server shows what the choice of ranks is for."""
    one, _ = server
    tokens = list(range(2000, 2000 + LENGTH))
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 400}, "stream": True}
    with ThreadPoolExecutor(RANKS) as pool:
        list(
            pool.map(lambda _: httpx.post(one.url + GENERATE, json=body, timeout=60), range(RANKS))
        )
    assert all(rank.cache.held_blocks >= LENGTH // 32 for rank in one.ranks)


def test_a_burst_of_one_prefix_does_not_wait_at_one_rank(server: tuple[Emulated, str]) -> None:
    """The others compute it once each, as long as less waits there."""
    one, url = server
    one.emulation.prefill_tokens_per_s = 2000.0
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: converse(url, 20_000), range(16)))
    assert {body["rank"] for body in one.bodies} == set(range(RANKS))


def test_a_rank_that_is_gone_is_no_fault_of_the_client(server: tuple[Emulated, str]) -> None:
    """A server came back with fewer ranks, and is examined at once."""
    one, url = server
    one.emulation.ranks = 1
    body = {"model": MODEL, "prompt": list(range(30_000, 30_000 + LENGTH)), "max_tokens": 2}
    with ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(httpx.post, f"{url}/v1/completions", json=body) for _ in range(4)]
    assert {post.result().status_code for post in posts} <= {200, 502, 503}
    wait_for(lambda: httpx.post(f"{url}/v1/completions", json=body).status_code == 200, 20)
    assert one.bodies[-1]["rank"] is None
