"""Which node a replica goes to, rule by rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.fleet_file import FleetConfig, PoolsConfig
from fleet.pools.nodes import CapacityError, Node, ReplicaNeed, check_nodes, choose, plan, usable


def node(name: str, cpus: float = 4.0, **more) -> Node:
    return Node(id=name, name=name, address=name, cpus=cpus, free_cpus=cpus, **more)


HEAD = node("head", head=True)
PLAIN = [HEAD, node("a"), node("b")]


def fleet(prefill: int, decode: int, cpus: float = 1.0) -> FleetConfig:
    return FleetConfig(pools=PoolsConfig(prefill=prefill, decode=decode), cpus_per_rank=cpus)


def test_the_head_takes_nothing_unless_it_is_alone() -> None:
    """Finding 5: by hand `ray start --head` offers its CPUs."""
    assert [n.name for n in usable("decode", PLAIN)] == ["a", "b"]
    assert [n.name for n in usable("decode", [HEAD])] == ["head"]
    idle = node("idle", cpus=0.0)
    assert [n.name for n in usable("decode", [HEAD, idle])] == ["head", "idle"]


def test_roles_go_to_the_nodes_that_are_reserved_for_them() -> None:
    nodes = [*PLAIN, node("d", roles=frozenset({"decode"}))]
    assert [n.name for n in usable("decode", nodes)] == ["d"]
    assert [n.name for n in usable("prefill", nodes)] == ["a", "b", "d"]


def test_replicas_of_a_role_are_spread_first_then_all_of_them() -> None:
    found = plan(fleet(2, 2), PLAIN)
    hosts = {worker_id: chosen[0].name for worker_id, chosen in found.items() if chosen}
    assert {hosts["worker-0"], hosts["worker-1"]} == {"a", "b"}
    assert {hosts["worker-2"], hosts["worker-3"]} == {"a", "b"}


def test_a_node_that_failed_comes_last_and_a_closed_one_never() -> None:
    assert choose(ReplicaNeed("decode", 1), PLAIN, {}, avoid={"a"})[0].name == "b"
    only = [HEAD, node("a")]
    assert choose(ReplicaNeed("decode", 1), only, {}, avoid={"a"})[0].name == "a"
    assert choose(ReplicaNeed("decode", 1), only, {}, closed={"a"}) == []


def test_what_is_full_is_not_chosen() -> None:
    nodes = [node("a", cpus=1.0), node("b", cpus=8.0)]
    assert choose(ReplicaNeed("decode", 2), nodes, {})[0].name == "b"
    assert choose(ReplicaNeed("decode", 9), nodes, {}) == []


def test_what_would_wait_for_ever_is_refused_by_name() -> None:
    check_nodes(fleet(4, 4), PLAIN)
    with pytest.raises(CapacityError, match=r"need 9 ranks .* room for 8"):  # not on the head
        check_nodes(fleet(4, 5), PLAIN)
    reserved = [*PLAIN, node("d", cpus=1.0, roles=frozenset({"decode"}))]
    with pytest.raises(CapacityError, match=r"need 2 ranks .* room for 1"):
        check_nodes(fleet(1, 2), reserved)
    with pytest.raises(
        CapacityError, match=r"no node is available .*: the nodes are head \(head\), a \("
    ):
        check_nodes(fleet(1, 1), PLAIN, closed={"a", "b"})


@given(
    sizes=st.tuples(st.integers(0, 5), st.integers(1, 5)),
    cpus=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_a_plan_never_gives_a_node_more_than_it_has(
    sizes: tuple[int, int], cpus: list[int]
) -> None:
    nodes = [node(f"n{i}", cpus=float(c)) for i, c in enumerate(cpus)]
    found = plan(fleet(*sizes), nodes)
    assert len(found) == sum(sizes)
    for each in nodes:
        assert sum(each in chosen for chosen in found.values()) <= each.cpus
    placed = sum(bool(chosen) for chosen in found.values())
    assert placed == min(sum(sizes), sum(cpus))


def names(chosen: list[Node]) -> str:
    return " ".join(node.name for node in chosen)


def vllm_fleet(workers: int, gpus: int, cpus: float = 1.0) -> FleetConfig:
    pools = {"prefill": 0, "decode": workers, "engine": "vllm"}
    pools["vllm"] = {"python": "/opt/vllm/bin/python", "gpus": gpus}
    return FleetConfig.model_validate(
        {"model": "/m", "numerics": "fast", "cpus_per_rank": cpus, "pools": pools}
    )


def test_workers_with_gpus_go_where_gpus_are_free() -> None:
    nodes = [node("a", cpus=64.0), node("b", gpus=4.0, free_gpus=4.0), node("c", gpus=1.0)]
    found = plan(vllm_fleet(2, gpus=2), nodes)
    assert [chosen[0].name for chosen in found.values()] == ["b", "b"]
    found = plan(vllm_fleet(3, gpus=2), nodes)
    assert found["worker-2"] == []
    assert choose(ReplicaNeed("decode", 1, gpus=1), nodes, {})[0].name == "b", "c has none free"


def test_gpus_that_are_not_there_are_refused_by_name() -> None:
    nodes = [node("a", cpus=64.0), node("b", gpus=4.0), node("c", cpus=1.0, gpus=4.0)]
    check_nodes(vllm_fleet(3, gpus=2), nodes)  # c has CPUs for one
    with pytest.raises(CapacityError, match=r"4 workers of 2 GPUs .* room for 3 \(3 nodes, 8 GPUs"):
        check_nodes(vllm_fleet(4, gpus=2), nodes)
    reserved = [*nodes, node("d", gpus=2.0, roles=frozenset({"decode"}))]
    with pytest.raises(CapacityError, match=r"room for 1 \(1 nodes, 2 GPUs"):
        check_nodes(vllm_fleet(2, gpus=2), reserved)
