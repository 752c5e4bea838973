"""Real engines on hosts: a node that joins, power loss; the weights were converted before."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness import FLEET, KEY, Cluster, wait_for
from tests.hosts.rig.cluster import ROOT, baton, share_program, share_ray_token
from tests.hosts.rig.namespaces import HOME, Rig
from tests.hosts.test_faults import made_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REAL = FLEET.replace(", engine: emulated", "").replace(
    "kv_blocks_per_worker: 512", "kv_blocks_per_worker: 256"
)
WARM = os.environ.get("BATON_CACHE") or str(Path.home() / ".cache" / "baton")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """All hosts see one folder of converted weights, as a shared path is."""
    Path(WARM).mkdir(parents=True, exist_ok=True)
    with Rig(shared=[ROOT], environment={"BATON_CACHE": WARM}) as rig:
        yield made_cluster(rig, REAL)


def test_a_node_that_joins_serves_soon(cluster: Cluster) -> None:
    """From `ray start` on a host that has never run anything to a worker there that is ready."""
    (host,) = cluster.rig.add("n4")
    share_program([host])
    share_ray_token([host], cluster.host("head").output(f"cat {HOME}/.ray/auth_token"))
    scale = ("scale", "--url", cluster.url, *KEY)
    began = time.monotonic()
    cluster.start_ray("n4")
    wait_for(lambda: "n4" in cluster.nodes(), 60)
    joined = time.monotonic()
    baton(cluster.host("client"), *scale, "decode=3")
    wait_for(lambda: cluster.places().get("worker-3") == "n4", 120)
    ready = time.monotonic()
    print(f"node joined after {joined - began:.1f} s, its worker ready after {ready - began:.1f} s")
    baton(cluster.host("client"), *scale, "decode=2")
    wait_for(cluster.whole, 60)


def test_a_worker_of_a_host_without_power_is_replaced(cluster: Cluster) -> None:
    victim = cluster.places()["worker-1"]
    load = cluster.load(60)
    cluster.rig.power_off(victim)
    began = time.monotonic()
    wait_for(lambda: victim not in cluster.places().values() and cluster.whole(), 120)
    print(f"power loss, real engines: replaced after {time.monotonic() - began:.1f} s")
    result = load.result()
    assert set(result) == {"ok"}, result
