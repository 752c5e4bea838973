"""A fleet whose decode worker has its two ranks on two hosts: neither has room for both."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.pools.controller import HEALTHY_AFTER_NS
from tests.hosts.harness import KEY, Cluster, wait_for
from tests.hosts.rig.cluster import ROOT, baton, share_program, share_ray_token, start_ray
from tests.hosts.rig.namespaces import HOME, Rig
from tests.hosts.test_faults import joins, made_cluster
from tests.hosts.test_real_engine import REAL, WARM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A host offers two CPUs: each has room for one rank, and three hosts for these three.
APART = (
    REAL.replace("cpus_per_rank: 0.5", "cpus_per_rank: 1.5")
    .replace("decode: 2", "decode: 1, tensor_parallel: {decode: 2, memory: own, nodes: several}")
    .replace("insecure: true}\nclients", "insecure: true, ports: 12000-12099}\nclients")
)
QUESTION = "Name three rivers and say of each where it begins in whole sentences."


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    Path(WARM).mkdir(parents=True, exist_ok=True)
    with Rig(shared=[ROOT], environment={"BATON_CACHE": WARM}) as rig:
        yield made_cluster(rig, APART, workers=2)


def answer(cluster: Cluster, mode: str = "disaggregated") -> str:
    """Of greedy decoding."""
    body = {"model": "default", "temperature": 0, "max_tokens": 32}
    body |= {"messages": [{"role": "user", "content": QUESTION}]}
    said = cluster.host("client").output(
        f"curl -s -m 60 {cluster.url}/v1/chat/completions -H 'Authorization: Bearer {KEY[1]}'"
        f" -H 'x-baton-mode: {mode}' -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        timeout_s=70,
    )
    text: str = json.loads(said)["choices"][0]["message"]["content"]
    return text


def decode_of(cluster: Cluster) -> dict[str, object]:
    """Its entry; one that has been dead for long is not shown."""
    found = {worker["id"]: worker for worker in cluster.fleet()}
    return found.get("worker-1", {"state": "dead", "reason": ""})


def held(cluster: Cluster) -> int:
    """Blocks that are not free to be used, of all workers that answer."""
    blocks = [w["kv_blocks"] for w in cluster.fleet() if w["state"] == "ready"]
    return sum(each["leased"] + each["quarantined"] for each in blocks)


def test_ranks_on_two_hosts_answer_as_one_and_their_replica_outlives_a_host(
    cluster: Cluster,
) -> None:
    decode = decode_of(cluster)
    leader, other = decode["rank_hosts"]
    assert leader != other and len(set(decode["ranks"])) == 2
    told = baton(cluster.host("client"), "status", "--url", cluster.url, *KEY, ok=False)
    assert f"{leader}:{decode['ranks'][0]}" in told and f"{other}:{decode['ranks'][1]}" in told
    text = answer(cluster)
    assert len(text) > 40
    wait_for(lambda: cluster.transfers()["count"] == 1, 10, lambda: "not handed over")

    time.sleep(HEALTHY_AFTER_NS / 1e9)  # now the leader's actor is there for the next life, too
    cluster.rig.power_off(other)
    began = time.monotonic()
    wait_for(lambda: "all nodes together have no room" in decode_of(cluster)["reason"], 180)
    print(f"said why it does not come back after {time.monotonic() - began:.1f} s")
    assert decode_of(cluster)["state"] != "ready"
    command = ("doctor", f"{HOME}/fleet.yaml", "--address", "auto")
    said = " ".join(baton(cluster.host("head"), *command, ok=False, timeout_s=240).split())
    assert "pools: pools need 3 ranks of 1.5 CPUs, the cluster has room for 2" in said
    assert not held(cluster)
    assert answer(cluster, "auto") == text, "of one rank, on the worker that is left"

    (host,) = cluster.rig.add("n4")
    share_program([host])
    share_ray_token([host], cluster.host("head").output(f"cat {HOME}/.ray/auth_token"))
    start_ray(host, cluster.host("head"))
    joins(cluster, "n4")
    began = time.monotonic()
    wait_for(cluster.whole, 180)
    print(f"whole {time.monotonic() - began:.1f} s after a host joined")
    assert set(decode_of(cluster)["rank_hosts"]) == {leader, "n4"}
    assert answer(cluster) == text
    wait_for(lambda: not held(cluster), 10)

    baton(cluster.host("client"), "drain", "--url", cluster.url, *KEY, "worker-1")
    wait_for(lambda: decode_of(cluster)["state"] == "parked", 60)
    for name in (leader, "n4"):
        left = cluster.host(name).output("ps -ef")
        assert "RankActor" not in left and "baton.engine.cpu.parallel" not in left, left
