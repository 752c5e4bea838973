"""Power loss with real engines: answers of the model, and a warm cache of weights."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.hosts.cluster import ROOT
from fleet.hosts.rig import Rig
from tests.hosts.harness import FLEET, Cluster, wait_for
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


def test_a_worker_of_a_host_without_power_is_replaced(cluster: Cluster) -> None:
    victim = cluster.places()["decode-0"]
    load = cluster.load(60)
    cluster.rig.power_off(victim)
    began = time.monotonic()
    wait_for(lambda: victim not in cluster.places().values() and cluster.whole(), 120)
    print(f"power loss, real engines: replaced after {time.monotonic() - began:.1f} s")
    result = load.result()
    assert set(result) == {"ok"}, result
