"""Reports of slow requests on a loaded pair with real weights: phases add up, causes are right."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet_processes import NAME, Fleet
from tests.fleet.test_up import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 12
WORDS = ("river", "stone", "lamp", "cloud", "table", "winter", "garden", "engine", "paper")
PHASE = {"worker_queue": "queue", "long_prompt": "prefill", "slow_decode": "decode"}
"""Phase of a cause, where it has another name."""
REST = ("unattributed", "between_workers", "transfer")
"""Causes that name the network or the hosts, of which nothing is wrong here."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A pair whose decode worker has room for three long prompts."""
    running = Fleet(tmp_path_factory.mktemp("f"))
    try:
        running.start("prefill-0", queued=64, kv_blocks=600)
        running.start_workers("decode-0", kv_blocks=300)
        wait_for(running.all_ready, 60)
        yield running
    finally:
        running.stop()


class Load:
    """Clients that send long prompts, each after the response to the one before."""

    def __init__(self, fleet: Fleet, requests: int) -> None:
        self._url = fleet.url
        self._numbers = iter(range(requests))
        self._lock = threading.Lock()
        self._names: list[str] = []

    def _client(self, _: int) -> None:
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            name = send(self._url, number)
            with self._lock:
                self._names.append(name)

    def reports(self) -> list[dict[str, Any]]:
        """Send all requests; return their reports."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._client, range(CLIENTS)))
        return [report(self._url, name) for name in self._names if name]


def send(
    url: str, number: int, words: int = 0, tokens: int = 0, mode: str = "disaggregated"
) -> str:
    """Send a prompt of its own to both workers; return its id, "" if one is not ready."""
    rng = random.Random(number)
    prompt = " ".join(rng.choices(WORDS, k=words or rng.randint(400, 1200)))
    body = {
        "model": NAME,
        "prompt": f"{number} {time.monotonic_ns()} {prompt}",
        "max_tokens": tokens or rng.randint(8, 24),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"x-baton-mode": mode}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
    # A busy machine delays heartbeats, and a worker that stands still is not ready.
    if "silent for" in answer.text or "no decode worker is ready" in answer.text:
        return ""
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def report(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/fleet/requests/{name}", timeout=30).json()
    assert found["state"] == "ended" and found["error"] is None, found
    return found


def test_phases_add_up_and_the_cause_is_the_costliest_phase(pair: Fleet) -> None:
    reports = Load(pair, 3 * CLIENTS).reports()
    rests = sorted(one["phases_s"]["unattributed"] / one["elapsed_s"] for one in reports)
    assert len(rests) >= 3 * CLIENTS - 4
    # Other programs on the machine delay single messages: a tenth may have more.
    assert rests[len(rests) * 9 // 10] <= 0.02, rests[-5:]
    blamed = [one["why"] for one in reports if one["why"]["cause"] in REST]
    assert len(blamed) <= 2, blamed
    for one in reports:
        phases_s = one["phases_s"]
        assert sum(phases_s.values()) == pytest.approx(one["elapsed_s"], rel=0.01, abs=0.02)
        cause = one["why"]["cause"]
        if (named := PHASE.get(cause, cause)) in phases_s and cause != "slow_decode":
            least_s = 0.9 * max(took_s for name, took_s in phases_s.items() if name != "decode")
            assert phases_s[named] >= least_s, (one["why"], phases_s)
    causes = {one["why"]["cause"]: one["why"]["sentence"] for one in reports}
    assert "at prefill-0, behind other prompts" in causes["worker_queue"], causes
    assert "at decode-0 for KV blocks" in causes["reservation"], causes


@contextlib.contextmanager
def short_requests(fleet: Fleet, mode: str = "disaggregated") -> Iterator[None]:
    """Two clients that keep both workers busy with short prompts."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            send(fleet.url, number, words=40, tokens=16, mode=mode)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client, number) for number in range(2)]
        try:
            yield
        finally:
            over.set()
    for one in clients:
        one.result()


def stand_still(pid: int, seconds: float) -> None:
    """Stop a process for some time."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_decode_engine_that_stands_still_is_a_stall(pair: Fleet) -> None:
    engine = pair.workers["decode-0"].record.pid
    with short_requests(pair), ThreadPoolExecutor(1) as pool:
        body = {"model": NAME, "prompt": "Once", "max_tokens": 120, "ignore_eos": True}
        headers = {"x-baton-mode": "disaggregated"}
        post = httpx.stream(
            "POST",
            f"{pair.url}/v1/completions",
            json={**body, "stream": True},
            headers=headers,
            timeout=100,
        )
        stopped = None
        with post as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == 20:
                    # After a longer one the worker leaves, and the response moves.
                    stopped = pool.submit(stand_still, engine, 2.0)
        assert stopped is not None
        stopped.result()
        found = report(pair.url, answer.headers["x-request-id"])
    assert found["why"]["cause"] == "stalled", found["why"]
    assert "at decode-0" in found["why"]["sentence"], (
        found["route"],
        found["chosen"],
        found["moves"],
    )
    assert found["longest_gaps"][0]["gap_s"] >= 1.8


def test_a_prefill_worker_that_does_not_answer_is_named(pair: Fleet) -> None:
    """Its engine computes the prompt meanwhile: neither queueing nor computing took the time."""
    shell = pair.workers["prefill-0"].process.pid
    with short_requests(pair), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, pair.url, 1, 150, 2)
        time.sleep(0.15)
        stand_still(shell, 1.8)
        found = report(pair.url, sent.result())
    assert found["why"]["cause"] == "between_workers", (found["why"], found["phases_s"])
    assert "between decode-0 and prefill-0" in found["why"]["sentence"]


def test_a_lost_decode_worker_is_named_as_the_cause_of_the_pause(pair: Fleet) -> None:
    """It stays silent, so the router resumes the response on the other worker."""
    lost = pair.workers["decode-0"]
    body = {"model": NAME, "prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True}
    headers = {"x-baton-mode": "disaggregated"}
    url = f"{pair.url}/v1/completions"
    with short_requests(pair, mode="auto"):
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number == 10:
                        os.kill(lost.process.pid, signal.SIGSTOP)
        finally:
            os.kill(lost.process.pid, signal.SIGCONT)
        found = report(pair.url, answer.headers["x-request-id"])
    assert found["why"]["cause"] == "moved", (found["why"], found["phases_s"], found["moves"])
    assert "until prefill-0 resumed it" in found["why"]["sentence"]


def post_raw(url: str, body: dict[str, Any], *, body_after_s: float, read_after_s: float) -> str:
    """Send a request by a socket that receives little at once; return the request's id."""
    parts = httpx.URL(url)
    content = json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((parts.host, parts.port))
        client.sendall(head.encode())
        time.sleep(body_after_s)
        client.sendall(content)
        first = client.recv(2048)
        time.sleep(read_after_s)
        while client.recv(65536):
            pass
    (name,) = re.findall(rb"x-request-id: (\S+)", first, re.IGNORECASE)
    return name.decode()


def test_a_client_that_sends_its_request_slowly_is_named(pair: Fleet) -> None:
    body = {"model": NAME, "prompt": "Once", "max_tokens": 8, "ignore_eos": True}
    with short_requests(pair):
        url = f"{pair.url}/v1/completions"
        found = report(pair.url, post_raw(url, body, body_after_s=3.0, read_after_s=0.0))
    assert found["why"]["cause"] == "tokenize", (found["why"], found["phases_s"])
    assert "Reading, checking and tokenizing the request took 3." in found["why"]["sentence"]


def test_a_client_that_reads_slowly_is_named(pair: Fleet) -> None:
    """Its response of some MB fits into no buffer."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 8}
    body |= {"max_tokens": 500, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    with short_requests(pair):
        url = f"{pair.url}/v1/chat/completions"
        found = report(pair.url, post_raw(url, body, body_after_s=0.0, read_after_s=40.0))
    assert found["why"]["cause"] == "slow_client", (found["why"], found["phases_s"])


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Fleet]:
    """A pair whose decode worker receives no KV while it generates."""
    running = Fleet(tmp_path)
    try:
        running.start("prefill-0", "decode-0", kv_blocks=600, receive_cpu_share=0.0002)
        wait_for(running.all_ready, 60)
        yield running
    finally:
        running.stop()


def test_a_transfer_that_is_held_up_is_named(limited: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(send, limited.url, 1, 8, 600)
        time.sleep(1.0)
        found = report(limited.url, send(limited.url, 2, 1500, 8))
        other.result()
    assert found["why"]["cause"] == "transfer", (found["why"], found["phases_s"])
    assert "from prefill-0 to decode-0" in found["why"]["sentence"]
