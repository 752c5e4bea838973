"""A fleet of 2 + 2 workers on five hosts, in every run: whoever is lost, others have served it.

Without Ray, which takes a minute to start on so many; ``test_cluster.py`` and ``test_faults.py``
have it. Engines are emulated: an answer depends on every KV byte, so a wrong one shows.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config.load import load_config
from tests.hosts.harness import FLEET, TOKEN, Cluster, start_worker, wait_for
from tests.hosts.rig.cluster import ROOT, share_program, start_redis
from tests.hosts.rig.namespaces import HOME, Rig, unavailable

pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "it is possible"),
    pytest.mark.timeout(180),
]
WORKERS = {"prefill-0": "n1", "prefill-1": "n2", "decode-0": "n1", "decode-1": "n3"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file: Path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    with Rig(shared=[ROOT]) as rig:
        hosts = rig.add("head", "n1", "n2", "n3", "client")
        share_program(hosts)
        redis = start_redis(rig.hosts["client"], "a-password")
        file.write_text(FLEET % redis)
        config = load_config(file)
        for host in hosts[:4]:
            host.write(f"{HOME}/fleet.token", TOKEN)
        head = rig.hosts["head"]
        head.write(f"{HOME}/fleet.yaml", file.read_text())
        head.start(
            f"exec {sys.executable} -m router --config {HOME}/fleet.yaml > {HOME}/router.log 2>&1",
            environment={"BATON_REDIS_URL": redis, "BATON_FLEET_TOKEN_FILE": f"{HOME}/fleet.token"},
        )
        for worker_id, place in WORKERS.items():
            start_worker(rig.hosts[place], worker_id, config)
        made = Cluster(rig, redis, workers=len(WORKERS))
        wait_for(made.whole, 120, lambda: head.output(f"cat {HOME}/router.log"))
        yield made


@pytest.mark.slow
def test_hosts_that_are_cut_off_and_lost_under_load(cluster: Cluster) -> None:
    assert cluster.places() == WORKERS
    load = cluster.load(14)
    cluster.rig.cut("n2")
    wait_for(lambda: "prefill-1" not in cluster.places(), 30)
    cluster.rig.join("n2")
    cluster.rig.power_off("n3")
    wait_for(lambda: "decode-1" not in cluster.places(), 30)
    wait_for(lambda: "prefill-1" in cluster.places(), 30)
    time.sleep(1)
    cluster.rig.slow_down("n2", "5mbit")
    result = load.result()
    assert set(result) == {"ok"}, result
    assert sorted(cluster.places()) == ["decode-0", "prefill-0", "prefill-1"]
