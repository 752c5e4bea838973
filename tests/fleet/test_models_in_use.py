"""Models of a fleet in use: one is added, a router dies, and a Ray cluster is shared."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fleet.local import state as fleet_state
from tests.fleet.test_new_version import FLEET, MODEL, Rollout, rollout
from tests.fleet.test_up import Serve, Served, serve, wait_for

__all__ = ["rollout", "serve"]

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(550)]

BATON = (sys.executable, "-m", "fleet.cli.main")
TWO = "\n".join(f"  {name}: {{model: {MODEL}}}" for name in ("v1", "v2"))


def test_a_model_is_added_while_clients_send_requests(rollout: Rollout) -> None:
    rollout.baton("models", "alias", "chat", "v1")
    for thread in rollout.threads:
        thread.start()
    rollout.check("v1")
    before = rollout.workers()
    rollout.baton("models", "add", f"v1={MODEL}", "--decode", "1")
    wait_for(lambda: {"v1-worker-0", "v1-2-worker-0"} == set(rollout.workers()), 120)
    assert rollout.workers()["v1-worker-0"]["pid"] == before["v1-worker-0"]["pid"]
    rollout.check("v1")
    rollout.baton("models", "canary", "chat", "v1@2", "--share", "50%")
    time.sleep(1.0)
    rollout.check("v1", "v1@2")
    assert f"v1@2:\n    model: {MODEL}" in rollout.file.read_text()


class Clients:
    """Clients that connect anew for each request, and the results with their times."""

    def __init__(self, url: str) -> None:
        self.results: list[tuple[float, int]] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(6)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            body = {"model": "chat", "prompt": f"{number} {count}", "max_tokens": 400}
            body |= {"ignore_eos": True}
            began_s = time.monotonic()
            try:
                with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
                    status = client.post("/v1/completions", json=body).status_code
            except httpx.HTTPError:
                status = 0
            self.results.append((began_s, status))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def test_a_killed_router_leaves_no_copy_of_a_shadow(serve: Serve) -> None:
    config = FLEET.replace("VERSIONS", TWO).replace("decode: 1,", "decode: 1, routers: 2,")
    served = serve([*BATON, "up"], config)
    url = served.wait_ready(240)
    subprocess.run([*BATON, "models", "alias", "chat", "v1"], check=True, timeout=60)
    shadow = ("shadow", "chat", "v2", "--share", "100%")
    subprocess.run([*BATON, "models", *shadow], check=True, timeout=60)
    state = fleet_state.load("up-test")
    assert state is not None

    def routers() -> list[psutil.Process]:
        found = fleet_state.processes_of(state.run_folder)
        return [one for one in found if "router" in one.cmdline()]

    clients = Clients(url)
    try:
        [victim, other] = routers()
        wait_for(lambda: len(clients.results) >= 12 and copies(url)["running"] >= 2, 60)
        victim.kill()
        killed_s = time.monotonic()
        wait_for(lambda: sum(began > killed_s + 0.5 for began, _ in clients.results) >= 12, 60)
    finally:
        clients.stop()
    assert other.is_running()
    assert {status for began, status in clients.results if began > killed_s + 0.5} == {200}
    assert {status for began, status in clients.results if began < killed_s} <= {200, 0}
    wait_for(lambda: not copies(url)["running"] and not copies(url)["kv_blocks"]["leased"], 30)
    assert lapsed(url) >= 1, "copies of the killed router would have run on"


def lapsed(url: str) -> float:
    """Number of copies that ended because their router was gone."""
    listed = httpx.get(f"{url}/fleet/targets", trust_env=False, timeout=30).json()
    [target] = [one["targets"][0] for one in listed if "v2-worker-0" in one["labels"].values()]
    page = httpx.get(f"http://{target}/metrics", trust_env=False, timeout=30).text
    [count] = [
        line.split()[-1] for line in page.splitlines() if line.startswith("baton_orphans_total")
    ]
    return float(count)


def copies(url: str) -> dict[str, Any]:
    """The worker that runs the copies."""
    workers = httpx.get(f"{url}/fleet", trust_env=False, timeout=30).json()["workers"]
    return next(one for one in workers if one["model"] == "v2")


@pytest.fixture
def ray_address() -> Iterator[str]:
    """A Ray cluster of this machine that no fleet has started."""
    command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block")
    options = ("--port=0", "--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats")
    with tempfile.TemporaryDirectory(prefix="btr") as folder:
        head = subprocess.Popen(
            [*command, *options, f"--temp-dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            file = Path(folder) / "ray_current_cluster"
            wait_for(file.exists, 40)
            yield file.read_text().strip()
            assert head.poll() is None, "the cluster is not the fleet's to stop"
        finally:
            head.terminate()
            head.wait(30)


def test_two_models_share_a_ray_cluster(
    serve: Callable[..., Served], ray_address: str, tmp_path: Path
) -> None:
    config = FLEET.replace("VERSIONS", TWO)
    served = serve([*BATON, "up", "--address", ray_address], config)
    url = served.wait_ready(240)

    def answered(model: str) -> str:
        body = {"model": model, "prompt": "a", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-baton-route"].partition("decode=")[2].partition(" ")[0].strip(";")

    assert [answered("v1"), answered("v2")] == ["v1-worker-0", "v2-worker-0"]
    subprocess.run([*BATON, "models", "add", f"v3={MODEL}"], check=True, timeout=200)
    assert answered("v3") == "v3-worker-0"
    subprocess.run([*BATON, "models", "unload", "v2"], check=True, timeout=60)
    workers = {one["id"]: one["pid"] for one in fleet(url)}
    wait_for(lambda: not psutil.pid_exists(workers["v2-worker-0"]), 60)
    assert answered("v1") == "v1-worker-0"
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(40) == 0
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in workers.values()), 20)


def fleet(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/fleet", trust_env=False).json()["workers"]
    return found
