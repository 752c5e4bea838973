"""Versions of a model, `NAME@3`, through the router's HTTP. Real Redis."""

from typing import Any

import pytest

from baton.tenants.limits import Limits
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS
from tests.router.lanes.conftest import TwoLanes

__all__ = ["redis_server", "registry"]

TWO, TEN = "chat@2", "chat@10"


@pytest.fixture
async def lanes(two_lanes, registry) -> TwoLanes:
    return await two_lanes(names=(TEN, TWO), registry=registry)


async def ask(lanes: TwoLanes, name: str, **more: Any) -> Any:
    return await lanes.fleet.chat("hi", model=name, max_tokens=1, **more)


async def change(lanes: TwoLanes, verb: str, name: str, **more: Any) -> Any:
    return await lanes.fleet.http.post(
        "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
    )


async def test_a_name_without_a_version_means_the_lowest(lanes: TwoLanes) -> None:
    answer = await ask(lanes, "chat")
    assert answer.json()["model"] == TWO
    assert "why=lowest version" in answer.headers["x-baton-model"]
    assert len(lanes.second.submissions) == 1
    named = await ask(lanes, TEN)
    assert named.json()["model"] == TEN
    assert "why=named" in named.headers["x-baton-model"]
    assert (await ask(lanes, "chat@3")).status_code == 404
    listed = (await lanes.fleet.http.get("/v1/models")).json()["data"]
    assert {one["id"]: one["root"] for one in listed} == {TEN: TEN, TWO: TWO, "chat": TWO}
    assert (await lanes.fleet.http.get("/v1/models/chat")).json()["root"] == TWO
    tokens = await lanes.post("/tokenize", model="chat", prompt="hi")
    assert tokens.json()["max_model_len"] == 64  # of version 2


async def test_a_version_is_tried_promoted_and_rolled_back(lanes: TwoLanes) -> None:
    answer = await change(lanes, "canary", "chat", model=TEN, share=1.0)
    assert (answer.json()["route"]["target"], answer.json()["route"]["canary"]) == (TWO, TEN)
    answer = await ask(lanes, "chat")
    assert answer.json()["model"] == TEN
    assert answer.headers["x-baton-model"].endswith(f"rollback={TWO}")
    await change(lanes, "promote", "chat")
    assert (await ask(lanes, "chat")).json()["model"] == TEN
    back = await change(lanes, "rollback", "chat")
    assert back.json()["route"]["target"] == TWO
    assert (await ask(lanes, "chat")).json()["model"] == TWO


async def test_a_tenant_may_name_a_version_only_if_its_policy_allows_it(lanes: TwoLanes) -> None:
    policies = {"limited": Limits(models=("chat",)), "version": Limits(models=(TEN,))}
    lanes.fleet.router.policies.replace(policies)

    async def status(tenant: str, name: str) -> int:
        answer = await ask(lanes, name, headers={"x-baton-tenant": tenant})
        return int(answer.status_code)

    assert [await status("limited", name) for name in ("chat", TEN)] == [200, 404]
    assert [await status("version", name) for name in ("chat", TEN)] == [404, 200]
