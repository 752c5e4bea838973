"""The second fault table of docs/measurements/2026-11.md: each under load, each answer compared.

The engines are emulated but for the last case; an emulated answer depends on every KV byte.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness import (
    FLEET,
    GCS_PORT,
    KEY,
    NODES,
    Cluster,
    shifted_clock,
    wait_for,
)
from tests.hosts.rig.cluster import (
    ROOT,
    baton,
    run_unit,
    share_program,
    share_ray_token,
    start_redis,
)
from tests.hosts.rig.namespaces import HOME, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UNIT = ROOT / "deploy" / "baton-ray-node.service"
REPLACED_WITHIN_S = 180.0  # of a busy machine; what it took is printed
RAY = "#!{python}\nfrom ray.scripts.scripts import main\n\nmain()\n"


def made_cluster(rig: Rig, text: str = FLEET, workers: int = 3) -> Cluster:
    """Hosts, a Redis for the fleet on one of them, one for Ray's head on another, and the fleet."""
    hosts = rig.add("head", "n1", "n2", "n3", "client", "store")
    share_program(hosts)
    share_ray_token(hosts[:4])
    url = start_redis(rig.hosts["store"], "a-password")
    start_redis(rig.hosts["client"], "a-password", GCS_PORT)
    made = Cluster(rig, url, text, workers)
    for name in NODES:
        made.start_ray(name)
    made.up("head")
    made.wait_up("head")
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Rig(shared=[ROOT]) as rig:
        yield made_cluster(rig)


def comes_back(cluster: Cluster, name: str, **environment: str) -> None:
    """A host that lost power is started, and joins Ray."""
    token = cluster.host("client" if name == "head" else "head")
    text = token.output(f"cat {HOME}/.ray/auth_token", ok=False)
    host = cluster.rig.power_on(name)
    share_ray_token([host], text)
    cluster.start_ray(name, **environment)
    joins(cluster, name)


def joins(cluster: Cluster, name: str) -> None:
    """A node that Ray gives up as it begins, on a machine that is busy, begins again.

    As under our unit.
    """
    for _ in range(3):
        try:
            wait_for(lambda: name in cluster.nodes(), 30)
        except AssertionError:
            cluster.host(name).kill_everything()
            cluster.start_ray(name)
        else:
            return
    wait_for(lambda: name in cluster.nodes())


def only_ok(result: dict[str, int]) -> None:
    assert set(result) == {"ok"}, result


def test_a_host_that_is_cut_off_for_a_minute_joins_again_by_its_unit(cluster: Cluster) -> None:
    """Finding D: Ray gives the node up; systemd starts it again, with the command of our unit."""
    victim = cluster.places()["worker-1"]
    host = cluster.host(victim)
    host.output([sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], timeout_s=60)
    wait_for(lambda: victim not in cluster.nodes() and cluster.whole(), 90)
    host.write("/opt/baton/bin/ray", RAY.format(python=sys.executable), mode="755")
    host.write("/var/lib/baton/ray.token", host.output(f"cat {HOME}/.ray/auth_token"))
    address = f"{cluster.host('head').address}:6379"
    flags = f"--node-ip-address={host.address} --object-store-memory=80000000"
    run_unit(host, UNIT, {"RAY_HEAD": address, "RAY_FLAGS": flags})
    wait_for(lambda: victim in cluster.nodes(), 60, lambda: host.output(f"cat {HOME}/unit.log"))
    mover = next(w for w in ("worker-1", "worker-2") if cluster.places()[w] != victim)
    places = cluster.places()
    for name in {*places.values()} - {victim}:  # so that somebody lives there when it is cut
        if len([w for w in places if places[w] == name]) > 1:
            mover = next(w for w in places if places[w] == name)
    client = cluster.host("client")
    baton(client, "restart", mover, "--move", "--url", cluster.url, *KEY)
    wait_for(lambda: cluster.whole() and victim in cluster.places().values())

    load = cluster.load(100)
    cluster.rig.cut(victim)
    replaced_s = wait_for(lambda: victim not in cluster.places().values() and cluster.whole(), 58)
    time.sleep(max(0.0, 60.0 - replaced_s))
    cluster.rig.join(victim)
    joined_s = wait_for(lambda: victim in cluster.nodes(), 90, lambda: host.output("tail unit.log"))
    print(f"cut of 60 s: replaced after {replaced_s:.1f} s, node back {joined_s:.1f} s after it")
    only_ok(load.result())
    assert cluster.whole()


def test_a_host_that_hears_and_cannot_speak(cluster: Cluster) -> None:
    """A one-way cut: what it sends is lost, what is sent to it arrives."""
    victim = cluster.places()["worker-2"]
    load = cluster.load(50)
    cluster.rig.mute(victim)
    took_s = wait_for(lambda: victim not in cluster.places().values() and cluster.whole())
    print(f"one-way cut: replaced after {took_s:.1f} s")
    only_ok(load.result())
    cluster.rig.unhinder(victim)
    wait_for(lambda: victim in cluster.nodes() or "raylet" not in cluster.host(victim).output("ps"))
    if victim not in cluster.nodes():
        cluster.host(victim).kill_everything()
        cluster.start_ray(victim)
    wait_for(lambda: victim in cluster.nodes())


def test_a_dead_node_is_noticed_within_seconds_and_its_worker_replaced(cluster: Cluster) -> None:
    """Power loss; Ray's health check, with the settings of our files."""
    victim = cluster.places()["worker-1"]
    load = cluster.load(45)
    cluster.rig.power_off(victim)
    began = time.monotonic()
    noticed_s = wait_for(lambda: victim not in (cluster.nodes() or [victim]))
    wait_for(lambda: victim not in cluster.places().values() and cluster.whole(), REPLACED_WITHIN_S)
    print(f"power loss: noticed {noticed_s:.1f} s, replaced {time.monotonic() - began:.1f} s")
    only_ok(load.result())
    comes_back(cluster, victim)


def test_the_host_of_redis_loses_power_and_comes_back_empty(cluster: Cluster) -> None:
    load = cluster.load(45)
    cluster.rig.power_off("store")
    time.sleep(20)
    assert cluster.whole(), "the router goes on with what it knows"
    store = cluster.rig.power_on("store")
    start_redis(store, "a-password")
    only_ok(load.result())
    wait_for(cluster.whole)
    for name in ("n1", "n2", "n3"):
        joins(cluster, name)
    assert cluster.ups["head"].poll() is None


def test_a_clock_that_is_fifteen_minutes_wrong_wrongs_nobody(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Of one host's raylet and workers, before they start: their time of day, not their timers."""
    victim = cluster.places()["worker-2"]
    host = cluster.host(victim)
    host.kill_everything()
    wait_for(lambda: cluster.whole() and victim not in cluster.places().values())
    for shift_s in (900, -900):
        cluster.start_ray(victim, **shifted_clock(host, tmp_path, shift_s))
        wait_for(lambda: victim in cluster.nodes())
        load = cluster.load(30)
        places = cluster.places()
        shared = next(w for w in places if list(places.values()).count(places[w]) > 1)
        baton(cluster.host("client"), "restart", shared, "--move", "--url", cluster.url, *KEY)
        wait_for(lambda: cluster.whole() and victim in cluster.places().values())
        only_ok(load.result())
        host.kill_everything()
        wait_for(lambda: cluster.whole() and victim not in cluster.places().values())
    cluster.start_ray(victim)
    wait_for(lambda: victim in cluster.nodes())


def test_a_full_disk_loses_logs_and_nothing_else(cluster: Cluster) -> None:
    """``/tmp``, ``/home`` and ``/dev/shm`` of a worker's host have not one byte left."""
    victim = cluster.places()["worker-1"]
    host = cluster.host(victim)
    load = cluster.load(40)
    for folder in (HOME, "/tmp", "/dev/shm"):
        host.output(
            f"mount -o remount,size=$(df --output=used -B1 {folder} | tail -1) "
            f"$(df --output=target {folder} | tail -1); "
            f"dd if=/dev/zero of={folder}/fill bs=4k 2> /dev/null; true"
        )
        assert "No space" in host.output(f"echo {'x' * 9999} > {folder}/more", ok=False)
    time.sleep(5)
    host.output("kill -9 $(pgrep -f 'WorkerActor' | head -1)", ok=False)  # its next life, too
    wait_for(cluster.whole)
    only_ok(load.result())
    for folder in (HOME, "/tmp", "/dev/shm"):
        host.output(
            f"rm -f {folder}/fill {folder}/more; "
            f"mount -o remount,size=2g $(df --output=target {folder} | tail -1)"
        )


def test_a_link_of_five_megabit_is_slow_and_nothing_else(cluster: Cluster) -> None:
    """The only prefill worker's host speaks slowly: hand-offs take longer, or the prompt is
    computed where it is answered."""
    victim = cluster.places()["worker-0"]
    load = cluster.load(40)
    cluster.rig.slow_down(victim, "5mbit")
    only_ok(load.result())
    assert cluster.whole(), "nobody was taken for dead"
    cluster.rig.unhinder(victim)


def test_the_heads_host_loses_power_and_returns(cluster: Cluster) -> None:
    """Findings A, B and F, with a host that comes back with empty disks: state is in Redis."""
    url = cluster.second_router("n1")
    before = {w["id"]: (w["epoch"], w["pid"]) for w in cluster.fleet(url)}
    token = cluster.host("n1").output(f"cat {HOME}/.ray/auth_token")
    load = cluster.load(90, url)
    cluster.rig.power_off("head")
    time.sleep(20)
    head = cluster.rig.power_on("head")
    share_ray_token([head], token)
    cluster.start_ray("head")
    cluster.up("head")
    cluster.wait_up("head")
    assert "the fleet is already running: adopting its workers" in cluster.said("head")
    assert {w["id"]: (w["epoch"], w["pid"]) for w in cluster.fleet()} == before
    only_ok(load.result())
