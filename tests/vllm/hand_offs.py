"""Fleets of vLLM workers that hand KV over, and what tests ask them."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil

from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm import protocol
from baton.engine.vllm.server import GENERATIONS
from tests.fleet.test_up import Served, wait_for
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, Fleet, kill, sockets, wait_until_gone

LEASE_S = 30.0  # of vLLM, for KV that no other vLLM reads
REST_S = LEASE_S + 20.0
TIE = 0.3  # of log-probabilities: bf16 logits above 16 have steps of 0.125, two may be off by one
PREFILL = 0  # tokens that the client has
HAND_OFF = 1  # the first one, and decode's vLLM is loading the KV
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
    wait_until_gone(vllms)


def complete(fleet: Fleet, prompt: list[int] | str, tenant: str = "a", **more: Any) -> Any:
    """Return the response to a prompt that two workers must serve."""
    body = {"model": "smol", "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
    with fleet.client(tenant) as client:
        answer = client.post("/v1/completions", json=body, headers=APART)
    assert answer.status_code == 200, answer.text
    assert "mode=disaggregated" in answer.headers["x-baton-route"]
    return answer


def report_of(fleet: Fleet, answer: httpx.Response) -> dict[str, Any]:
    """Return the router's report on a request, when the worker has sent its times."""
    report: dict[str, Any] = {}

    def is_whole() -> bool:
        nonlocal report
        with fleet.client("operator") as client:
            report = client.get(f"/fleet/requests/{answer.headers['x-request-id']}").json()
        return report["worker_times_s"] is not None

    wait_for(is_whole, 10)
    return report


def route(answer: httpx.Response) -> dict[str, str]:
    pairs = answer.headers["x-baton-route"].split("; ")
    return dict(pair.split("=") for pair in pairs)


def has_pages(socket: str) -> bool:
    """Return whether a vLLM hands KV over by Baton's transports."""
    return Path(socket).with_name(GENERATIONS).exists()


def pages_in_use(socket: str) -> int:
    """Return the pages of a worker's pool that belong to a request, with Baton's transports."""
    file = Path(socket).with_name(GENERATIONS)
    return np.count_nonzero(np.fromfile(file, np.int64)) if has_pages(socket) else 0


def vllm_metric(socket: str, name: str) -> float:
    page = asyncio.run(HttpOrigin.of_socket(socket).fetch("GET", "/metrics", 30.0)).decode()
    rows = [row for row in page.splitlines() if row.startswith(f"vllm:{name}{{")]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def at_rest(fleet: Fleet) -> bool:
    """Return whether no worker and no vLLM has a request, or holds a block or page for one."""
    workers = fleet.ready()
    if any(one["running"] or one["waiting"] or one["kv_blocks"]["leased"] for one in workers):
        return False
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = sockets(fleet)
    if any(map(pages_in_use, found.values())):
        return False
    return not any(vllm_metric(found[one["id"]], name) for one in workers for name in names)


def cores_used(fleet: Fleet, duration_s: float) -> float:
    """Return the cores that the workers' vLLMs use."""
    servers = [psutil.Process(one["pid"]) for one in fleet.ready()]
    found = [one for server in servers for one in (server, *server.children(recursive=True))]
    before = sum(one.cpu_times().user + one.cpu_times().system for one in found)
    time.sleep(duration_s)
    after = sum(one.cpu_times().user + one.cpu_times().system for one in found)
    return (after - before) / duration_s


async def doubtful(socket: str, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return the tokens that vLLM alone would not choose behind those before them.

    Near ties are not counted.
    """
    body = {
        "request_id": "alone",
        "token_ids": [*prompt, *tokens],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1},
        "cache_salt": os.urandom(16).hex(),
    }
    answer = await HttpOrigin.of_socket(socket).fetch(
        "POST", protocol.GENERATE, 60.0, msgspec.json.encode(body)
    )
    rows = msgspec.json.decode(answer)["prompt_logprobs"][len(prompt) :]
    found: list[int] = []
    for token, row in zip(tokens, rows, strict=True):
        best = max(one["logprob"] for one in row.values())
        if best - row[str(token)]["logprob"] > TIE:
            found.append(token)
    return found


def check_a_kill(fleet: Fleet, role: str, victim: str, after_tokens: int) -> None:
    """Stream 60 tokens, kill a process of the pair after some of them, and check the tokens."""
    # takes a second and more
    prompt = [int(time.time()) % 10_000 + 7 * number for number in range(1200)]
    body = {"model": "smol", "prompt": prompt, "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = []
    group = asyncio.run(_killing(fleet, body, tokens, role, victim, after_tokens))
    assert len(tokens) == 60
    wait_until_gone(group)
    socket = next(iter(sockets(fleet).values()))
    assert asyncio.run(doubtful(socket, prompt, tokens)) == []


async def abort_at_random(fleet: Fleet, count: int) -> None:
    """Send streams whose clients disconnect after up to 2 s, in any phase of their requests."""
    random = Random(3)
    headers = {"authorization": "Bearer key-of-tenant-a", **APART}
    numbers = list(range(count))

    async def work(client: httpx.AsyncClient) -> None:
        while numbers:
            begin = numbers.pop() * 100
            prompt = list(range(begin, begin + random.randint(20, 800)))
            body = {"model": "smol", "prompt": prompt, "stream": True}
            body |= {"max_tokens": 200, "ignore_eos": True}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0, 2)):
                    async with client.stream("POST", "/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_lines():
                            pass

    async with httpx.AsyncClient(
        base_url=fleet.url, headers=headers, timeout=300, trust_env=False
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(8)))


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
            assert answer.status_code == 200, (await answer.aread()).decode()
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
