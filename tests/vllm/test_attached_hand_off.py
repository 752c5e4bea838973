"""KV hand-off between two vLLM servers that Baton did not start (`make test-vllm-hand-off`)."""

import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.fleet.test_up import Served, wait_for
from tests.vllm.hand_offs import APART, complete, route
from tests.vllm.places import MODEL, PYTHON
from tests.vllm.test_attached import NEEDED, READY_S, Server, free_ports
from tests.vllm.test_fleet import Fleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
PROMPT = list(range(700, 900))


class Pair(NamedTuple):
    """A prefill server, a decode server, and their fleet."""

    fleet: Fleet
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    servers = []
    for port, side_channel in zip(free_ports(2), free_ports(2), strict=True):
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        connector["kv_buffer_device"] = "cpu"
        own = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": f"{side_channel}",
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo",
        }
        more = (*NEEDED, "--kv-transfer-config", json.dumps(connector))
        servers.append(Server(folder, port, *more, variables=own))
    prefill, decode = servers
    config = f"""
fleet: pair
model: {MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
api_keys:
  key-of-tenant-a: a
  key-of-tenant-operator: {{tenant: operator, role: operator}}
pools:
  engine: vllm
  vllm:
    hand_off: nixl
    servers:
      - {{url: "{prefill.url}", role: prefill}}
      - {{url: "{decode.url}", role: decode}}
"""
    try:
        for server in servers:
            wait_for(server.is_healthy, READY_S)
        served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, config)
        try:
            fleet = Fleet(served.wait_ready(60))
            fleet.wait_until_all_are_ready()
            yield Pair(fleet, prefill, decode)
        finally:
            served.process.terminate()
            served.process.wait(60)
    finally:
        for server in servers:
            server.kill()


def ask(fleet: Fleet, prompt: list[int], mode: str) -> httpx.Response:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    with fleet.client() as client:
        headers = {"x-baton-mode": mode}
        return client.post(
            "/v1/completions", json={**body, "return_token_ids": True}, headers=headers
        )


def test_the_prompt_is_computed_at_one_server_and_the_response_at_the_other(pair: Pair) -> None:
    apart = complete(pair.fleet, PROMPT, max_tokens=8)
    workers = {one["host"].rpartition(":")[2]: one["id"] for one in pair.fleet.workers()}
    assert route(apart)["prefill"] == workers[f"{pair.prefill.port}"]
    assert route(apart)["decode"] == workers[f"{pair.decode.port}"]
    alone = ask(pair.fleet, PROMPT, "colocated").json()["choices"][0]["token_ids"]
    assert apart.json()["choices"][0]["token_ids"] == alone


def test_a_pair_that_fails_falls_back_with_the_reason(pair: Pair) -> None:
    """The prefill server is killed: the decode server computes the prompt."""
    pair.prefill.kill()
    answer = ask(pair.fleet, [*PROMPT, 7], "auto")
    assert answer.status_code == 200
    assert "mode=colocated" in answer.headers["x-baton-route"]
    wait_for(lambda: len(pair.fleet.ready()) == 1, 15)
    refused = ask(pair.fleet, PROMPT, APART["x-baton-mode"])
    assert refused.status_code == 503
