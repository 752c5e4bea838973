"""A Prometheus server with the shipped configuration."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from deploy.grafana.dashboards import FOLDER
from tests.e2e.fleet_processes import free_port

PROGRAM = shutil.which("prometheus")
SCRAPE_S = 1


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict]:
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10)
        told = answer.json()
        assert told["status"] == "success", (expression, told)
        return told["data"]["result"]

    def value(self, expression: str) -> float:
        found = self.query(expression)
        assert len(found) == 1, (expression, found)
        return float(found[0]["value"][1])

    def targets(self) -> list[dict]:
        answer = httpx.get(f"{self.url}/api/v1/targets", timeout=10).json()
        return answer["data"]["activeTargets"]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    limit_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit_s, "it did not come true in time"
        time.sleep(0.2)


@contextlib.contextmanager
def prometheus_of(url: str, folder: Path) -> Iterator[Prometheus]:
    """Start a server with the shipped configuration for the fleet at ``url``, and end it.

    Its intervals are shorter than those of the file.
    """
    port = free_port()
    config = (FOLDER.parent / "prometheus.yml").read_text()
    config = config.replace("http://127.0.0.1:8000", url)
    config = config.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S}s")
    config = config.replace("evaluation_interval: 15s", "evaluation_interval: 2s")
    config = config.replace("refresh_interval: 10s", "refresh_interval: 1s")
    assert url in config and config.count(":8000") == 1  # in a comment
    (folder / "prometheus.yml").write_text(config)
    shutil.copytree(FOLDER.parent / "prometheus", folder / "prometheus")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(PROGRAM),
                *("--config.file", str(folder / "prometheus.yml")),
                *("--storage.tsdb.path", str(folder / "data")),
                *("--web.listen-address", f"127.0.0.1:{port}"),
            ],
            stdout=log,
            stderr=log,
        )
    own_url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(own_url), 20)
        yield Prometheus(own_url)
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
