"""Hand-offs by NIXL between two vLLM workers (`make test-vllm-hand-off`), on this machine's CPU."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.fleet.test_up import wait_for
from tests.vllm.hand_offs import (
    ANSWER,
    APART,
    PREFILL,
    REST_S,
    at_rest,
    check_a_kill,
    complete,
    cores_used,
    doubtful,
    route,
    serving,
    vllm_metric,
)
from tests.vllm.places import PYTHON
from tests.vllm.test_fleet import READY_S, Fleet, alone, load, sockets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with serving(tmp_path_factory.mktemp("vllm"), 1, 1) as fleet:
        yield fleet


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
    with fleet.client("operator") as client:
        report = client.get(f"/fleet/requests/{answer.headers['x-request-id']}").json()
    assert report["route"]["mode"] == "disaggregated"
    assert report["worker_times_s"]["transfer"] > 0
    tokens = report["prompt_tokens"]
    assert report["worker_times_s"]["transfer_bytes"] == tokens * 30 * 2 * 3 * 64 * 4


def test_the_tokens_are_those_of_vllm_alone(fleet: Fleet) -> None:
    """But for near ties. Some prompts fill their last block of 32 tokens, some do not."""
    different: list[int] = []
    own_sockets = sockets(fleet)
    for number in range(32):
        prompt = list(range(300 + 40 * number, 300 + 40 * number + 17 + 5 * number))
        answer = complete(fleet, prompt, max_tokens=12)
        socket = own_sockets[route(answer)["decode"]]
        own = asyncio.run(alone(socket, prompt))
        if answer.json()["choices"][0]["token_ids"] != own:
            different.append(number)
            tokens = answer.json()["choices"][0]["token_ids"]
            assert not asyncio.run(doubtful(socket, prompt, tokens)), (number, tokens, own)
    assert len(different) <= 4, different


def test_idle_workers_do_not_poll(fleet: Fleet) -> None:
    """After a hand-off, when the progress threads of NIXL have connections."""
    wait_for(lambda: at_rest(fleet), REST_S)
    wait_for(lambda: cores_used(fleet, 4.0) < 0.5, 20)  # threads that poll never rest


def test_nothing_is_left_after_many_requests_of_which_half_are_aborted(fleet: Fleet) -> None:
    asyncio.run(load(fleet, 100, APART))
    wait_for(lambda: at_rest(fleet), REST_S)


@pytest.mark.parametrize(("role", "after_tokens"), [("prefill", PREFILL), ("decode", ANSWER)])
def test_a_stream_goes_on_when_a_vllm_is_killed(fleet: Fleet, role: str, after_tokens: int) -> None:
    wait_for(lambda: len(fleet.ready()) == 2, READY_S)
    check_a_kill(fleet, role, "core", after_tokens)
    wait_for(lambda: at_rest(fleet), REST_S)
