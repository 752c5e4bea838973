"""Admin commands of a router with two models: each reaches the controllers that it is for."""

from typing import Any

import pytest

from baton.registry.orders import Answer
from tests.router.lanes.conftest import OTHER

TOKEN = {"authorization": "Bearer secret"}


class Desk:
    """A controller's queue, which answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: list[tuple[str, tuple[str, ...]]] = []

    async def ask(self, verb: str, worker_ids: Any, *_: Any) -> Answer:
        self.taken.append((verb, tuple(worker_ids)))
        if verb == "nodes":
            node = {"address": "a", "free_cpus": 2.0 - len(self.name), "workers": [self.name]}
            return Answer(data=[node])
        return Answer(data={"of": self.name} if verb in ("plan", "scale") else None)


@pytest.fixture
async def desks(two_lanes, monkeypatch):
    first = Desk("s")
    second = Desk(OTHER)
    lanes = await two_lanes(orders=second, first_orders=first)

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
    assert nodes == [{"address": "a", "free_cpus": -3.0, "workers": ["s", OTHER]}]


async def test_each_model_has_a_planner(desks) -> None:
    _, _, _, lanes = desks
    http = lanes.fleet.http
    assert (await http.get("/fleet/planner")).json() == {"of": "s"}
    found = await http.get("/fleet/planner", params={"model": OTHER})
    assert found.json() == {"of": OTHER}
