"""Admin commands of a router with two models: each reaches the controllers that it is for."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from baton.registry.admin_commands import CommandReply
from baton.registry.redis_store import Registry
from router.sources import LaneTables
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS, record_of, until
from tests.router.lanes.conftest import OTHER

__all__ = ["redis_server", "registry"]

TOKEN = {"authorization": "Bearer secret"}


class Desk:
    """A controller's queue, which answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: list[tuple[str, tuple[str, ...]]] = []

    async def ask(self, verb: str, worker_ids: Any, *_: Any) -> CommandReply:
        self.taken.append((verb, tuple(worker_ids)))
        if verb == "nodes":
            node = {"address": "a", "free_cpus": 2.0 - len(self.name), "workers": [self.name]}
            node["free_gpus"] = float(len(self.name))
            return CommandReply(data=[node])
        return CommandReply(data={"of": self.name} if verb in ("plan", "scale") else None)


def with_desk(registry: Registry, desk: Desk) -> LaneTables:
    return replace(LaneTables.of(registry), commands=desk)


@pytest.fixture
async def desks(two_lanes, registry):
    first = Desk("s")
    second = Desk(OTHER)
    lanes = await two_lanes(
        tables=with_desk(registry, second), first_tables=with_desk(registry, first)
    )

    async def order(verb: str, **body: Any) -> Any:
        answer = await lanes.fleet.http.post(
            "/fleet/orders", json={"verb": verb, **body}, headers=TOKEN
        )
        return answer.json().get("data"), answer.status_code, answer.text

    return first, second, order, lanes


async def test_a_command_about_a_worker_goes_to_its_controller(desks) -> None:
    first, second, order, _ = desks
    await order("drain", workers=["other-decode-0"])
    assert (first.taken, second.taken) == ([], [("drain", ("other-decode-0",))])
    _, status, text = await order("restart", workers=["other-decode-0", "decode-0"])
    assert status == 400
    assert "belong to several models" in text


async def test_sizes_need_the_name_of_a_model(desks) -> None:
    first, second, order, _ = desks
    _, status, text = await order("scale", arguments={"decode": 2})
    assert status == 400
    assert "model: is required: this fleet serves smollm2, other" in text
    data, _, _ = await order("scale", arguments={"decode": 2}, model=OTHER)
    assert data == {"of": OTHER}
    assert (first.taken, second.taken) == ([], [("scale", ())])


async def test_a_command_about_all_workers_goes_to_all_controllers(desks) -> None:
    first, second, order, _ = desks
    await order("roll")
    assert first.taken == second.taken == [("roll", ())]
    nodes, _, _ = await order("nodes")
    workers = ["s", OTHER]
    assert nodes == [{"address": "a", "free_cpus": -3.0, "free_gpus": 1.0, "workers": workers}]


async def test_each_model_has_a_planner(desks) -> None:
    _, _, _, lanes = desks
    http = lanes.fleet.http
    assert (await http.get("/fleet/planner")).json() == {"of": "s"}
    found = await http.get("/fleet/planner", params={"model": OTHER})
    assert found.json() == {"of": OTHER}


async def test_a_model_is_unloaded_only_if_no_name_leads_to_it(two_lanes, registry) -> None:
    second = Desk(OTHER)
    lanes = await two_lanes(tables=with_desk(registry, second), registry=registry)
    http = lanes.fleet.http

    async def change(verb: str, name: str, **more: Any) -> tuple[int, str]:
        answer = await http.post(
            "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
        )
        return answer.status_code, answer.text

    await change("canary", "smollm2", model=OTHER, share=0.1)
    status, text = await change("unload", OTHER)
    assert status == 400
    assert "smollm2 leads to other" in text
    await change("rollback", "smollm2")
    assert (await change("unload", OTHER))[0] == 200
    assert (await change("load", OTHER))[0] == 200
    assert second.taken == [("unload", ()), ("load", ())]
    status, text = await change("unload", "nothing")
    assert "must be one of smollm2, other" in text


async def test_a_fleet_is_ready_without_the_models_that_are_unloaded(two_lanes) -> None:
    lanes = await two_lanes(probe_pause_s=0.0)
    record = record_of("other-decode-0", "", intent="leave")
    lanes.directory.put(msgspec.structs.replace(record, state="dead"))
    await lanes.second.stop()
    [_, lane] = lanes.fleet.router.lanes
    await until(lambda: not lane.is_loaded and not list(lane.gateway.workers.usable))
    ready = await lanes.fleet.http.get("/health/ready")
    assert ready.status_code == 200
    await until(lambda: not any(slot.state == "ready" for slot in lane.gateway.workers))
    models = (await lanes.fleet.http.get("/fleet/models")).json()["models"]
    assert {one["name"]: one["loaded"] for one in models} == {"smollm2": True, OTHER: False}
    assert {one["name"]: one["workers"] for one in models} == {"smollm2": {"ready": 1}, OTHER: {}}
    answer = await lanes.post("/v1/completions", model=OTHER, prompt="hi", max_tokens=1)
    assert answer.status_code == 503
