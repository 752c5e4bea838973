"""Hand-offs between three vLLM workers (`make test-vllm-hand-off`), on this machine's CPU.

Two prefill workers, so that there is another one after each kill. A prefill worker resumes the
responses of the decode worker. A vLLM takes 33 s of CPU time to start, so that all tests share one
fleet for each way of hand-offs.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.engine.vllm.selftest import prove_exact
from baton.engine.vllm.server import origin_in, read_facts
from baton.types.errors import InternalError
from tests.fleet.test_up import wait_for
from tests.vllm.hand_offs import (
    ANSWER,
    APART,
    HAND_OFF,
    PREFILL,
    REST_S,
    abort_at_random,
    at_rest,
    check_a_kill,
    complete,
    cores_used,
    doubtful,
    has_pages,
    report_of,
    route,
    serving,
    vllm_metric,
)
from tests.vllm.places import PYTHON
from tests.vllm.test_exact import VOCABULARY
from tests.vllm.test_fleet import READY_S, Fleet, alone, load, sockets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]


@pytest.fixture(scope="module", params=["nixl", "baton"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with serving(tmp_path_factory.mktemp("vllm"), 2, 1, request.param) as fleet:
        yield fleet


@pytest.mark.parametrize("fleet", ["nixl"], indirect=True)
def test_paris_comes_through_the_hand_off(fleet: Fleet) -> None:
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    before = {
        name: vllm_metric(one, "nixl_bytes_transferred_sum") for name, one in sockets(fleet).items()
    }
    with fleet.client() as client:
        answer = client.post("/v1/chat/completions", json=body, headers=APART)
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
    place = route(answer)
    assert place["mode"] == "disaggregated"
    assert place["prefill"] != place["decode"]
    decode = sockets(fleet)[place["decode"]]
    assert vllm_metric(decode, "nixl_bytes_transferred_sum") > before[place["decode"]]
    report = report_of(fleet, answer)
    assert report["route"]["mode"] == "disaggregated"
    assert report["worker_times_s"]["transfer"] > 0
    tokens = report["prompt_tokens"]
    assert report["worker_times_s"]["transfer_bytes"] == tokens * 30 * 2 * 3 * 64 * 4


@pytest.mark.parametrize("fleet", ["nixl"], indirect=True)
def test_the_tokens_are_those_of_vllm_alone(fleet: Fleet) -> None:
    """But for near ties. Some prompts fill their last block of 32 tokens, some do not."""
    different: list[int] = []
    own_sockets = sockets(fleet)
    for number in range(12):
        prompt = list(range(300 + 40 * number, 300 + 40 * number + 17 + 15 * number))
        answer = complete(fleet, prompt, max_tokens=12)
        socket = own_sockets[route(answer)["decode"]]
        own = asyncio.run(alone(socket, prompt))
        if answer.json()["choices"][0]["token_ids"] != own:
            different.append(number)
            tokens = answer.json()["choices"][0]["token_ids"]
            assert not asyncio.run(doubtful(socket, prompt, tokens)), (number, tokens, own)
    assert len(different) <= 2, different


@pytest.mark.parametrize("fleet", ["nixl"], indirect=True)
def test_idle_workers_do_not_poll(fleet: Fleet) -> None:
    """After a hand-off, when the progress threads of NIXL have connections."""
    wait_for(lambda: at_rest(fleet), REST_S)
    wait_for(lambda: cores_used(fleet, 4.0) < 0.5, 20)  # threads that poll never rest


def test_choices_and_logprobs_come_through_the_hand_off(fleet: Fleet) -> None:
    more = {"n": 2, "max_tokens": 6, "logprobs": 3, "temperature": 1.0, "seed": 3}
    choices = complete(fleet, "Hello, my name is", **more).json()["choices"]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    for choice in choices:
        assert len(choice["token_ids"]) == 6
        assert len(choice["logprobs"]["token_logprobs"]) == 6
    again = complete(fleet, "Hello, my name is", **more).json()["choices"]
    assert [one["token_ids"] for one in again] == [one["token_ids"] for one in choices]


def test_a_format_is_kept_on_one_worker(fleet: Fleet) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = fleet.ask("Give me a person.", max_tokens=80, response_format=form)
    assert set(json.loads(answer.json()["choices"][0]["message"]["content"])) == {"age"}
    assert "mode=colocated" in answer.headers["x-baton-route"]
    body = {"model": "smol", "prompt": "Hi", "presence_penalty": 1.0}
    with fleet.client() as client:
        refused = client.post("/v1/completions", json=body, headers=APART)
    assert refused.status_code == 400
    assert "do not hand over responses with a format" in refused.json()["error"]["message"]


def test_two_tenants_never_share_a_block(fleet: Fleet) -> None:
    """Neither at the prefill worker nor at the decode worker."""
    prompt = list(range(5000, 5160))
    first = complete(fleet, prompt, max_tokens=2)
    assert cached(first) == 0
    wait_for(lambda: cached(complete(fleet, prompt, max_tokens=2)) == 128, 30)  # 4 of 5 blocks
    decode = sockets(fleet)[route(first)["decode"]]
    before = vllm_metric(decode, "external_prefix_cache_hits_total")
    stranger = complete(fleet, prompt, "b", max_tokens=2)
    assert cached(stranger) == 0
    loaded = vllm_metric(decode, "external_prefix_cache_hits_total") - before
    assert loaded >= len(prompt)  # NIXL counts the first token, too
    assert stranger.json()["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]


def test_the_next_turn_computes_and_moves_only_what_is_new(fleet: Fleet) -> None:
    """With Baton's connector prefill pulls the blocks of the response from decode."""
    first = list(range(8000, 8160))
    answer = complete(fleet, first, max_tokens=200, ignore_eos=True)
    time.sleep(1.0)  # until the router knows the blocks of the response
    prompt = [*first, *answer.json()["choices"][0]["token_ids"], *range(8500, 8540)]
    held_tokens = 352  # in whole blocks, of 359 with KV
    second = complete(fleet, prompt, max_tokens=8)
    report = report_of(fleet, second)
    moved_bytes = report["worker_times_s"]["transfer_bytes"]
    assert moved_bytes == (len(prompt) - held_tokens) * 30 * 2 * 3 * 64 * 4
    decode = route(second)["decode"]
    socket = sockets(fleet)[decode]
    if has_pages(socket):
        assert report["prefix_from"][-1] == {"worker_id": decode, "blocks": held_tokens // 16}
        assert cached(second) == held_tokens
    else:
        assert cached(second) <= len(first)
    tokens = second.json()["choices"][0]["token_ids"]
    assert not asyncio.run(doubtful(socket, prompt, tokens))


def cached(answer: httpx.Response) -> int:
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_nothing_is_left_after_clients_that_disconnect(fleet: Fleet) -> None:
    """Half of many at their first token, then others at random."""
    asyncio.run(load(fleet, 50, APART))
    asyncio.run(abort_at_random(fleet, 50))
    wait_for(lambda: at_rest(fleet), REST_S)


# in turns, so that a worker of each role is ready while the others start
@pytest.mark.parametrize(
    ("role", "with_nixl", "with_baton", "after_tokens"),
    [
        ("prefill", "core", "core", PREFILL),
        ("decode", "shell", "server", ANSWER),
        ("prefill", "process", "shell", HAND_OFF),
        ("decode", "core", "shell", HAND_OFF),
    ],
)
def test_a_stream_goes_on_when_a_process_of_its_pair_is_killed(
    fleet: Fleet, role: str, with_nixl: str, with_baton: str, after_tokens: int
) -> None:
    wait_for(lambda: {"prefill", "decode"} <= {one["role"] for one in fleet.ready()}, READY_S)
    victim = with_baton if has_pages(sockets(fleet).popitem()[1]) else with_nixl
    check_a_kill(fleet, role, victim, after_tokens)


def test_nothing_is_left_after_the_kills(fleet: Fleet) -> None:
    wait_for(lambda: len(fleet.ready()) == 3, READY_S)
    wait_for(lambda: at_rest(fleet), REST_S)
    complete(fleet, "The capital of France is", max_tokens=4)


@pytest.mark.parametrize("fleet", ["nixl"], indirect=True)
async def test_without_the_batch_invariant_mode_the_bits_depend_on_the_batch(fleet: Fleet) -> None:
    """The last one: on a busy host its batch may hold up the worker's probe for too long."""
    folder = str(Path(next(iter(sockets(fleet).values()))).parent)
    origin = origin_in(folder)
    facts = await read_facts(folder)
    with pytest.raises(InternalError, match="mode is off"):
        await prove_exact(origin, facts, VOCABULARY)
    pretended = msgspec.structs.replace(facts, batch_invariant=True)
    with pytest.raises(InternalError, match="in a batch differ from those of"):
        await prove_exact(origin, pretended, VOCABULARY)
