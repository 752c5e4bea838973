"""Fleets of vLLM workers that hand KV over, and what tests ask them."""

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm import http, protocol
from baton.types.params import SampledToken, SamplingParams
from tests.fleet.test_up import Served, wait_for
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, Fleet, alive, kill

LEASE_S = 30.0  # of vLLM, for KV that no other vLLM reads
REST_S = LEASE_S + 20.0
TIE = 0.2  # of log-probabilities in bf16
HAND_OFF = 1  # tokens that the client has: the first one, and decode's vLLM is loading the KV
ANSWER = 20
APART = {"x-baton-mode": "disaggregated"}
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
  prefill: %d
  decode: %d
  engine: vllm
  vllm: {{python: {PYTHON}, hand_off: %s, args: {json.dumps(ARGS)}}}
"""


@contextlib.contextmanager
def serving(folder: Path, prefill: int, decode: int, hand_off: str = "nixl") -> Iterator[Fleet]:
    """Run a fleet until all its workers are ready, and end it with all their vLLMs."""
    config = CONFIG % (prefill, decode, hand_off)
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, config)
    vllms: list[psutil.Process] = []
    try:
        fleet = Fleet(served.wait_ready(READY_S))
        wait_for(lambda: len(fleet.ready()) == prefill + decode, READY_S)
        yield fleet
        vllms += [psutil.Process(one["pid"]) for one in fleet.ready()]
    finally:
        served.process.terminate()
        served.process.wait(60)
    wait_for(lambda: not any(map(alive, vllms)), 20)


def complete(fleet: Fleet, prompt: list[int] | str, tenant: str = "a", **more: Any) -> Any:
    """Return the response to a prompt that two workers must serve."""
    body = {"model": "smol", "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
    with fleet.client(tenant) as client:
        answer = client.post("/v1/completions", json=body, headers=APART)
    assert answer.status_code == 200, answer.text
    assert "mode=disaggregated" in answer.headers["x-baton-route"]
    return answer


def route(answer: httpx.Response) -> dict[str, str]:
    pairs = answer.headers["x-baton-route"].split("; ")
    return dict(pair.split("=") for pair in pairs)


def sockets(fleet: Fleet) -> dict[str, str]:
    lines = {one["id"]: psutil.Process(one["pid"]).cmdline() for one in fleet.ready()}
    return {name: line[line.index("--uds") + 1] for name, line in lines.items()}


def vllm_metric(socket: str, name: str) -> float:
    page = asyncio.run(http.fetch(socket, "GET", "/metrics", 30.0)).decode()
    rows = [row for row in page.splitlines() if row.startswith(f"vllm:{name}{{")]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def at_rest(fleet: Fleet) -> bool:
    """Return whether no worker and no vLLM has a request or holds a block for one."""
    workers = fleet.ready()
    if any(one["running"] or one["waiting"] or one["kv_blocks"]["leased"] for one in workers):
        return False
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = sockets(fleet)
    return not any(vllm_metric(found[one["id"]], name) for one in workers for name in names)


def cores_used(fleet: Fleet, duration_s: float) -> float:
    """Return the cores that the workers' vLLMs use."""
    servers = [psutil.Process(one["pid"]) for one in fleet.ready()]
    found = [one for server in servers for one in (server, *server.children(recursive=True))]
    before = sum(one.cpu_times().user + one.cpu_times().system for one in found)
    time.sleep(duration_s)
    after = sum(one.cpu_times().user + one.cpu_times().system for one in found)
    return (after - before) / duration_s


async def near_tie(socket: str, prompt: list[int], tokens: list[int]) -> bool:
    """Return whether tokens differ from those of vLLM alone at first by a near tie in bf16."""
    params = SamplingParams(max_tokens=len(tokens), temperature=0.0, logprobs=5)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=os.urandom(16))
    stream = protocol.ChoiceStream("alone", 0, spec, (2,))
    own: list[SampledToken] = []

    def take(data: bytes) -> None:
        own.extend(token for run in stream.feed(data) for token in run.tokens)

    body = protocol.generate_body("alone", prompt, spec, 0, (2,))
    request = http.request_bytes("POST", protocol.GENERATE, body)
    assert await (await http.begin(socket, request, take)).done
    for token, chosen in zip(tokens, own, strict=False):
        if token != chosen.token:
            best = max(logprob for _, logprob in chosen.top)
            return best - dict(chosen.top).get(token, -math.inf) < TIE
    return len(tokens) == len(own)


def stream_through_a_kill(
    fleet: Fleet, role: str, victim: str, after_tokens: int
) -> tuple[list[int], list[psutil.Process]]:
    """Stream a response of 60 tokens, and kill a process of its pair after so many of them."""
    # takes a second and more
    prompt = [int(time.time()) % 10_000 + 7 * number for number in range(1200)]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = []
    group = asyncio.run(_killing(fleet, body, tokens, role, victim, after_tokens))
    return tokens, group


async def _killing(
    fleet: Fleet, body: dict[str, Any], tokens: list[int], role: str, victim: str, after: int
) -> list[psutil.Process]:
    headers = {"authorization": "Bearer key-of-tenant-a", **APART}
    group: list[psutil.Process] = []
    async with httpx.AsyncClient(
        base_url=fleet.url, headers=headers, timeout=300, trust_env=False
    ) as client:
        if not after:
            group_task = asyncio.ensure_future(asyncio.to_thread(_kill_busy, fleet, role, victim))
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            place = route(answer)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = msgspec.json.decode(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids") or []
                if after and len(tokens) >= after and not group:
                    group = kill(fleet, place[role], victim)
        return group if after else await group_task


def _kill_busy(fleet: Fleet, role: str, victim: str) -> list[psutil.Process]:
    """Kill a process of the first worker of a role that has a request."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for one in fleet.ready():
            if one["role"] == role and one["running"]:
                return kill(fleet, one["id"], victim)
        time.sleep(0.02)
    raise AssertionError("no worker was busy")
