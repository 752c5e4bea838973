"""A fleet on five hosts: started, watched, moved, and faults under load with golden answers.

Slow, and for `make test-hosts`: the hosts share the machine's cores. The engines are emulated: what
is tried here is not the model. An emulated answer depends on every KV byte, so a wrong one shows.
"""

import sys
import time
from collections.abc import Iterator

import pytest

from tests.hosts.harness import FLEET, GCS_PORT, KEY, NODES, Cluster, wait_for
from tests.hosts.rig.cluster import ROOT, baton, share_program, share_ray_token, start_redis
from tests.hosts.rig.namespaces import HOME, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Rig(shared=[ROOT]) as rig:
        hosts = rig.add("head", "n1", "n2", "n3", "client")
        share_program(hosts)
        share_ray_token(hosts[:4])
        url = start_redis(rig.hosts["client"], "a-password")
        start_redis(rig.hosts["client"], "a-password", GCS_PORT)
        made = Cluster(rig, url)
        for name in NODES:
            made.start_ray(name)
        made.up("head")
        made.wait_up("head")
        yield made


def test_workers_are_spread_and_the_head_has_none(cluster: Cluster) -> None:
    """Findings 5, 7 and 9."""
    assert "http://10.77.0.1:8000/v1" in cluster.said("head"), "the URL that others reach"
    places = cluster.places()
    assert sorted(places) == ["worker-0", "worker-1", "worker-2"]
    assert "head" not in places.values()
    assert len(set(places.values())) == 3
    table = baton(cluster.host("client"), "nodes", "--url", cluster.url, *KEY)
    assert "10.77.0.2" in table and "head" in table


def test_logs_of_every_node_come_from_any_host(cluster: Cluster) -> None:
    """Finding 8."""
    text = baton(cluster.host("client"), "logs", "worker-1", "--url", cluster.url, *KEY)
    assert f"==> {cluster.places()['worker-1']}: worker-1.log <==" in text
    refused = baton(cluster.host("client"), "nodes", "--url", cluster.url, ok=False)
    assert "API key is required" in " ".join(refused.split())


def test_a_second_up_is_refused_and_names_the_owner(cluster: Cluster) -> None:
    """Finding C."""
    before = cluster.fleet()
    cluster.up("n1")
    assert cluster.ups["n1"].wait(60) == 1
    said = " ".join(cluster.said("n1").split())
    assert "fleet rig is run by `baton up` on head" in said and "--take-over" in said
    assert [w["epoch"] for w in cluster.fleet()] == [w["epoch"] for w in before]


def test_a_worker_moves_and_a_node_is_emptied(cluster: Cluster) -> None:
    """Finding E, and the drain of a node."""
    load = cluster.load(25)
    place = cluster.places()["worker-1"]
    client = cluster.host("client")
    baton(client, "drain", "--node", place, "--url", cluster.url, *KEY)
    wait_for(lambda: cluster.whole() and place not in cluster.places().values())
    baton(client, "drain", "--node", place, "--undo", "--url", cluster.url, *KEY)
    before = cluster.places()["worker-1"]
    baton(client, "restart", "worker-1", "--move", "--url", cluster.url, *KEY)
    wait_for(lambda: cluster.whole() and cluster.places()["worker-1"] != before)
    result = load.result()
    assert set(result) == {"ok"}, result


def test_a_host_whose_processes_are_all_killed(cluster: Cluster) -> None:
    """Fault table: kill -9 of a host; its slot lives on elsewhere, nobody hears of it."""
    victim = cluster.places()["worker-2"]
    load = cluster.load(30)
    cluster.host(victim).kill_everything()
    took_s = wait_for(lambda: victim not in cluster.places().values() and cluster.whole())
    print(f"kill -9 of a host: replaced after {took_s:.1f} s")
    result = load.result()
    assert set(result) == {"ok"}, result
    cluster.start_ray(victim)


def test_a_host_that_is_cut_off_for_five_seconds(cluster: Cluster) -> None:
    victim = cluster.places()["worker-2"]
    load = cluster.load(30)
    cluster.rig.cut(victim)
    time.sleep(5)
    cluster.rig.join(victim)
    took_s = wait_for(cluster.whole)
    print(f"cut of 5 s: whole again {took_s:.1f} s after the link was back")
    result = load.result()
    assert set(result) == {"ok"}, result


def test_a_file_that_changed_rolls_what_must_roll(cluster: Cluster) -> None:
    """The supervisor is killed; the next one finds workers of other settings and renews them."""
    head = cluster.host("head")
    before = {w["id"]: w["epoch"] for w in cluster.fleet()}
    head.output("kill -9 $(pgrep -f 'fleet[.]cli.main up')")  # of the host's own processes
    cluster.ups["head"].wait(10)
    changed = FLEET.replace("prefill: 1, decode: 2", "prefill: 1, decode: 1")
    cluster.up("head", file=changed.replace("blocks_per_worker: 512", "blocks_per_worker: 256"))
    cluster.wait_up("head")
    wait_for(lambda: sorted(cluster.places()) == ["worker-0", "worker-1"])
    wait_for(lambda: all(w["epoch"] > before[w["id"]] for w in cluster.fleet()))
    wait_for(lambda: all(w["kv_blocks"]["total"] == 256 for w in cluster.fleet()))


def test_down_cleans_a_cluster_that_nobody_runs(cluster: Cluster) -> None:
    """Finding B: whatever is left of a fleet is ended by name, without this machine's state."""
    head = cluster.host("head")
    head.output("kill -9 $(pgrep -f 'fleet[.]cli.main up')")
    cluster.ups["head"].wait(10)
    head.output("rm -r ~/.local/state/baton")
    text = baton(head, "down", f"{HOME}/fleet.yaml", "--address", "auto", timeout_s=120)
    assert "removed from the cluster" in text
    assert "baton-rig" not in head.output(
        [sys.executable, "-c", _ACTORS], environment={"RAY_AUTH_MODE": "token"}
    )


_ACTORS = (
    "import ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR');"
    "print([a['name'] for a in ray.util.list_named_actors(all_namespaces=True)])"
)
