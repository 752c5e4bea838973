"""Places on a cluster: chosen, kept from life to life, given up when their node is silent.

Ray's calls are played by stand-ins; the nodes are real sockets, or nobody. ``tests/hosts`` has all
of it for real.
"""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.config.fleet_file import FleetConfig, PoolsConfig
from baton.telemetry.tasks import BackgroundTasks
from fleet.pools import placement
from fleet.pools.nodes import Node
from fleet.pools.placement import Placements

CONFIG = FleetConfig(fleet="f", pools=PoolsConfig(prefill=1, decode=2), cpus_per_rank=1)


class Ray:
    """What Ray was asked for, and whether it can."""

    def __init__(self) -> None:
        self.reserved: list[str] = []  # addresses, in turn
        self.removed: list[str] = []
        self.full: set[str] = set()  # addresses where nothing can be reserved
        self.nodes: list[Node] = []
        self.left: dict[str, dict[str, object]] = {}

    def reserve(self, bundles, strategy: str, **_options) -> SimpleNamespace:
        each = [name[5:] for bundle in bundles for name in bundle if name.startswith("node:")]
        address = " ".join(dict.fromkeys(each))
        assert len(each) == len(bundles) and strategy == "STRICT_PACK"
        self.reserved.append(address)
        return SimpleNamespace(address=address)

    def table(self, group: SimpleNamespace | None = None) -> dict[str, object]:
        if group is None:
            return dict(self.left)
        return {"state": "PENDING" if group.address in self.full else "CREATED"}

    def remove(self, group: Any) -> None:
        self.removed.append(group.address if hasattr(group, "address") else group.id.hex())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(placement, "placement_group", made.reserve)
    monkeypatch.setattr(placement, "placement_group_table", made.table)
    monkeypatch.setattr(placement, "remove_placement_group", made.remove)
    monkeypatch.setattr(placement, "cluster_nodes", lambda: list(made.nodes))
    monkeypatch.setattr(placement, "_RESERVE_LIMIT_S", 0.3)
    return made


@pytest.fixture
def raylets(ray: Ray) -> Iterator[dict[str, socket.socket]]:
    """Two nodes, each with somebody who listens."""
    listening = {
        address: socket.create_server((address, 0)) for address in ("127.0.0.2", "127.0.0.3")
    }
    ray.nodes = [
        Node(id=a, name=a, address=a, port=s.getsockname()[1], cpus=2.0, free_cpus=2.0)
        for a, s in listening.items()
    ]
    yield listening
    for each in listening.values():
        each.close()


async def place(placements: Placements, worker_id: str, *, move: bool = False) -> str:
    role = "prefill" if worker_id.startswith("prefill") else "decode"
    group = await placements.place(worker_id, role, asyncio.Event(), move=move)
    assert group.address == placements.address_of(worker_id)
    return group.address


def placements_of() -> Placements:
    return Placements(CONFIG, BackgroundTasks("test"), chooses=True)


async def test_a_slot_keeps_its_node_until_the_node_is_silent(ray: Ray, raylets) -> None:
    """The review's "one life wasted on the dead node"."""
    placements = placements_of()
    first = await place(placements, "decode-0")
    assert await place(placements, "decode-0") == first
    assert ray.reserved == [first]
    raylets[first].close()
    second = await place(placements, "decode-0")
    assert second != first and ray.removed == [first]
    assert await place(placements, "decode-1") == second, "who failed lately comes last"


async def test_a_move_is_to_another_node_if_there_is_one(ray: Ray, raylets) -> None:
    """Finding E."""
    placements = placements_of()
    first = await place(placements, "decode-0")
    assert await place(placements, "decode-0", move=True) != first
    ray.nodes = ray.nodes[:1]
    assert await place(placements, "decode-0", move=True) == ray.nodes[0].address


async def test_a_node_that_cannot_reserve_is_passed_over(ray: Ray, raylets) -> None:
    ray.full = {"127.0.0.2"}
    placements = placements_of()
    assert [await place(placements, f"decode-{n}") for n in range(2)] == ["127.0.0.3"] * 2
    assert "127.0.0.2" in ray.removed, "nothing is left there"


async def test_who_is_not_wanted_any_more_is_not_placed(ray: Ray) -> None:
    placements, unwanted = placements_of(), asyncio.Event()
    asking = asyncio.create_task(placements.place("decode-0", "decode", unwanted))
    await asyncio.sleep(0.05)
    unwanted.set()
    with pytest.raises(RuntimeError, match="stopped before it was placed"):
        await asking
    assert ray.reserved == []


async def test_what_an_earlier_controller_left_is_adopted_or_given_back(ray: Ray, raylets) -> None:
    """Finding B: names that are taken stop nothing, and places of nobody go."""
    entries = [  # name, node, state
        ("baton-f-worker-0.2", "127.0.0.3", "CREATED"),
        ("baton-f-worker-0.1", "127.0.0.2", "CREATED"),
        ("baton-f-worker-1.1", "127.0.0.2", "CREATED"),
        ("baton-f-worker-2.1", "127.0.0.2", "REMOVED"),
        ("baton-f-g-worker-0.1", "127.0.0.2", "CREATED"),  # of the fleet "f-g"
    ]
    ray.left = {
        str(n): {
            "name": name,
            "state": state,
            "placement_group_id": f"{n:036x}",
            "bundles_to_node_id": {0: node},
        }
        for n, (name, node, state) in enumerate(entries)
    }
    placements = placements_of()
    await placements.adopt({"worker-0"})
    assert placements.address_of("worker-0") == "127.0.0.3"
    assert sorted(ray.removed) == [f"{1:036x}", f"{2:036x}"]
    placements.remove_all()
    assert ray.removed[-1] == f"{0:036x}"
