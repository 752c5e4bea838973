"""Workers and controllers of several models: names, specifications, placement, changes."""

from baton.config.fleet_file import FleetConfig
from baton.registry.redis_store import Registry
from baton.registry.types import is_worker_name
from baton.types.lanes import lane_fleet, whole_fleet, worker_prefix
from fleet.local.changes import changes
from fleet.pools.controller import FleetController
from fleet.pools.nodes import Node, plan
from fleet.pools.resources import ControllerSpec, actors_among, engine_settings, specs_of
from fleet.pools.slots import Launch

FIELDS = {
    "fleet": "f",
    "models": {
        "small": {"model": "package:x/small.gguf", "pools": {"prefill": 0, "decode": 1}},
        "large.v1": {"model": "package:x/large.gguf", "pools": {"prefill": 1, "decode": 2}},
    },
    "pools": {"engine": "emulated"},
}
TWO = FleetConfig.model_validate(FIELDS)
SPEC = ControllerSpec(config_json="{}", redis_url="", fleet_token="", host="", log_dir="")


def with_large(**pools: int) -> FleetConfig:
    large = {"model": "package:x/large.gguf", "pools": {"prefill": 1, "decode": 2, **pools}}
    models = {**FIELDS["models"], "large.v1": large}  # type: ignore[dict-item]
    return FleetConfig.model_validate({**FIELDS, "models": models})


def test_a_lane_is_a_fleet_of_its_own_in_redis_and_ray() -> None:
    name = lane_fleet("f", "large.v1")
    assert (name, whole_fleet(name), worker_prefix(name)) == ("f.large-v1", "f", "large-v1-")
    assert (whole_fleet("f"), worker_prefix("f")) == ("f", "")


def test_ids_of_workers_start_with_their_lane() -> None:
    fleet = FleetController({"prefill": 0, "decode": 2}, 0, prefix="large-v1-")
    launched = [action.worker_id for action in fleet.tick(0) if isinstance(action, Launch)]
    assert launched == ["large-v1-worker-0", "large-v1-worker-1"]
    assert [slot.number for slot in fleet.slots.values()] == [0, 1]


def test_no_lane_adopts_the_workers_of_another_one_or_of_another_fleet() -> None:
    names = [
        {"namespace": "baton", "name": name}
        for name in (
            "baton-f.small-small-worker-0-3",
            "baton-f.large-v1-large-v1-worker-1-2",
            "baton-f-worker-7-1",
            "baton-f-small-worker-0-9",  # of a fleet named f-small
        )
    ]
    assert not is_worker_name("worker-0", "small-")
    assert dict(actors_among(names, "f.small")) == {"small-worker-0": 3}
    assert dict(actors_among(names, "f.large-v1")) == {"large-v1-worker-1": 2}
    assert dict(actors_among(names, "f")) == {"worker-7": 1}
    assert dict(actors_among(names, "f-small")) == {"worker-0": 9}


def test_each_lane_has_a_controller_that_knows_the_other_workers() -> None:
    specs = specs_of(TWO, SPEC)
    assert {name: spec.other_workers for name, spec in specs.items()} == {
        "f.small": 3,
        "f.large-v1": 1,
    }
    for name, spec in specs.items():
        [lane] = FleetConfig.model_validate_json(spec.config_json).lanes
        assert lane.fleet == name
    assert specs_of(FleetConfig(), SPEC) == {"local": SPEC}


def test_workers_of_all_lanes_share_the_memory_of_a_host(monkeypatch) -> None:
    monkeypatch.setattr("fleet.pools.resources._emulated", lambda _: None)
    monkeypatch.setattr("fleet.pools.resources.usable_cpus", lambda: 8)
    small = TWO.lanes[0]
    assert engine_settings(small, "decode").workers_on_host == 1
    assert engine_settings(small, "decode", other_workers=3).workers_on_host == 4


def test_replicas_of_all_lanes_are_placed_together() -> None:
    node = Node(
        id="n",
        name="n",
        address="a",
        port=1,
        head=False,
        cpus=3.0,
        free_cpus=3.0,
        roles=frozenset(),
    )
    places = plan(TWO, [node])
    assert list(places) == [
        "small-worker-0",
        "large-v1-worker-0",
        "large-v1-worker-1",
        "large-v1-worker-2",
    ]
    assert [bool(chosen) for chosen in places.values()] == [True, True, True, False]


async def test_lanes_have_their_own_keys_and_share_a_connection() -> None:
    registry = Registry("redis://127.0.0.1:1", "f")
    lane = registry.of_lane("f.small")
    assert registry.key("orders") != lane.key("orders")
    assert lane.of_whole_fleet().key("tenants") == registry.key("tenants")
    assert registry.of_whole_fleet() is registry
    await registry.close()


def test_changed_sizes_of_a_model_are_planned_by_name(monkeypatch) -> None:
    monkeypatch.setattr("fleet.pools.resources._emulated", lambda _: None)
    found = changes(TWO, with_large(decode=3))
    assert found.added == ("large.v1: 1 decode worker",)
    assert (found.removed, found.renewed, found.refused) == ((), (), ())


def test_a_model_that_comes_is_started_and_one_that_goes_ends_after_the_routers(
    monkeypatch,
) -> None:
    monkeypatch.setattr("fleet.pools.resources._emulated", lambda _: None)
    small = TWO.models["small"]
    one = TWO.model_copy(update={"models": {"small": small, "tiny": small}})
    found = changes(TWO, one)
    assert found.added == ("tiny: 1 decode worker",)
    assert found.removed == ("large.v1: 1 prefill worker", "large.v1: 2 decode workers")
    assert found.models_ended == ("large.v1",)
    assert found.router
    assert found.refused == ()
    assert "models" in found.keys


def test_other_weights_need_another_name(monkeypatch) -> None:
    monkeypatch.setattr("fleet.pools.resources._emulated", lambda _: None)
    other = FleetConfig.model_validate(
        {**FIELDS, "models": {**FIELDS["models"], "small": {"model": "package:x/other.gguf"}}}  # type: ignore[dict-item]
    )
    assert "model cannot change while the fleet runs" in changes(TWO, other).refused[0]
    plain = FleetConfig.model_validate({"fleet": "f", "pools": {"engine": "emulated"}})
    assert "workers have other names" in changes(plain, TWO).refused[0]
