"""Aliases, canaries and fallbacks through the router's HTTP. Real Redis."""

import asyncio
import time
from typing import Any

import pytest

from baton.config.clients import ApiKeyConfig
from baton.registry.shared_tables import SharedRoutes
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.tenants.usage.bill import IDLE
from baton.tenants.usage.ledger import HOUR_S, WORKERS, Ledger, RowName
from baton.tenants.usage.shared import SharedUsage
from baton.types.routes import RouteTable
from router.lanes.route_table import SyncedRoutes
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS, until
from tests.router.lanes.conftest import OTHER, TwoLanes

__all__ = ["redis_server", "registry"]


@pytest.fixture
async def lanes(two_lanes, registry) -> TwoLanes:
    return await two_lanes(registry=registry)


async def change(lanes: TwoLanes, verb: str, name: str, **more: Any) -> Any:
    return await lanes.fleet.http.post(
        "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
    )


async def ask(lanes: TwoLanes, name: str, text: str = "hi", **more: Any) -> Any:
    return await lanes.fleet.chat(text, model=name, max_tokens=1, **more)


async def test_an_alias_leads_to_its_model_and_the_answer_says_so(lanes: TwoLanes) -> None:
    assert (await ask(lanes, "chat")).status_code == 404
    assert (await change(lanes, "alias", "chat", model=OTHER)).status_code == 200
    answer = await ask(lanes, "chat")
    assert answer.json()["model"] == OTHER
    version = lanes.fleet.lane.model.version
    assert answer.headers["x-baton-model"] == f"other; version={version}; why=alias"
    assert len(lanes.second.submissions) == 1
    assert not lanes.first.submissions
    listed = (await lanes.fleet.http.get("/v1/models")).json()["data"]
    assert {one["id"]: one["root"] for one in listed}["chat"] == OTHER
    named = await ask(lanes, "smollm2")
    assert named.headers["x-baton-model"] == f"smollm2; version={version}; why=named"


async def test_a_conversation_stays_with_its_version_on_every_endpoint(lanes: TwoLanes) -> None:
    await change(lanes, "alias", "chat", model="smollm2")
    await change(lanes, "canary", "chat", model=OTHER, share=0.5)
    models = set()
    for number in range(12):
        text = f"question {number}"
        first = await ask(lanes, "chat", text)
        model = first.json()["model"]
        models.add(model)
        turns = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and?"},
        ]
        for path, more in (
            ("/v1/chat/completions", {}),
            ("/v1/messages", {"system": "be brief"}),
            ("/v1/responses", {"instructions": "be brief"}),
        ):
            if path == "/v1/chat/completions":
                system = {"role": "system", "content": f"it is {number} o'clock"}
                answer = await lanes.post(
                    path, model="chat", messages=[system, *turns], max_tokens=1
                )
                assert answer.json()["model"] == model, answer.text
            key = "input" if path == "/v1/responses" else "messages"
            limit = {"max_output_tokens" if key == "input" else "max_tokens": 1}
            answer = await lanes.post(path, model="chat", **{key: turns}, **limit, **more)
            assert answer.json()["model"] == model, answer.text
    assert models == {"smollm2", OTHER}


async def test_a_canary_by_tenant_says_what_to_roll_back_to(lanes: TwoLanes) -> None:
    await change(lanes, "canary", "smollm2", model=OTHER, tenants=["beta"])
    answer = await ask(lanes, "smollm2", headers={"x-baton-tenant": "beta"})
    assert answer.json()["model"] == OTHER
    assert answer.headers["x-baton-model"].endswith("why=tenant; rollback=smollm2")
    report = (await lanes.fleet.http.get(f"/fleet/requests/{answer.json()['id']}")).json()
    assert report["model"] == {
        "model": OTHER,
        "version": lanes.fleet.lane.model.version,
        "why": "tenant",
        "rollback_to": "smollm2",
        "requested": "smollm2",
    }
    assert (await ask(lanes, "smollm2")).json()["model"] == "smollm2"


async def test_promotion_and_rollback_lose_no_request(lanes: TwoLanes) -> None:
    """Requests run without a pause while the name goes through every state."""
    await change(lanes, "alias", "chat", model="smollm2")
    answers: list[Any] = []
    ended = asyncio.Event()

    async def keep_asking(number: int) -> None:
        while not ended.is_set():
            answers.append(await ask(lanes, "chat", f"question {number} {len(answers)}"))

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(keep_asking(number))
        for verb, more in (
            ("canary", {"model": OTHER, "share": 0.2}),
            ("canary", {"model": OTHER, "share": 0.6}),
            ("promote", {}),
            ("rollback", {}),
            ("canary", {"model": OTHER, "share": 0.5}),
            ("rollback", {}),
        ):
            done = await change(lanes, verb, "chat", **more)
            assert done.status_code == 200, done.text
            await asyncio.sleep(0.3)
        ended.set()
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["model"] for answer in answers} == {"smollm2", OTHER}
    assert len(answers) > 50
    assert (await ask(lanes, "chat")).json()["model"] == "smollm2"


async def test_a_fallback_answers_only_clients_that_allow_it(lanes: TwoLanes) -> None:
    await change(lanes, "fallback", OTHER, fallbacks=["smollm2"])
    await lanes.second.stop()
    [_, lane] = lanes.fleet.router.lanes
    await until(lambda: not lane.gateway.workers.usable)
    assert (await ask(lanes, OTHER)).status_code == 503
    answer = await ask(lanes, OTHER, headers={"x-baton-fallback": "allow"})
    assert answer.json()["model"] == "smollm2"
    assert "why=fallback: other has no ready worker" in answer.headers["x-baton-model"]
    wrong = await ask(lanes, OTHER, headers={"x-baton-fallback": "yes"})
    assert "must be never or allow (got 'yes')" in wrong.text


async def test_models_that_are_not_served_are_refused(lanes: TwoLanes) -> None:
    answer = await change(lanes, "alias", "chat", model="v9")
    assert answer.status_code == 400
    assert "v9 is not served; this fleet serves smollm2, alias, other" in answer.text
    assert "nothing to roll back" in (await change(lanes, "rollback", "chat")).text
    assert "canary needs a model" in (await change(lanes, "canary", "chat", share=0.1)).text
    assert (await change(lanes, "explode", "chat")).status_code == 400


async def test_a_tenant_with_some_models_may_use_an_alias_only_if_it_is_named(
    two_lanes, registry
) -> None:
    lanes = await two_lanes(registry=registry)
    await change(lanes, "alias", "chat", model=OTHER)
    router = lanes.fleet.router
    table = router.routes.table
    found = router.lanes.route(table, "chat", "t", ("chat",), "hi")
    assert found.model == OTHER
    with pytest.raises(Exception, match="'chat' is not served"):
        router.lanes.route(table, "chat", "t", ("smollm2",), "hi")


async def test_other_routers_follow_within_a_second_and_restore_what_redis_lost(
    lanes: TwoLanes, registry, tmp_path
) -> None:
    file = tmp_path / "routes.json"
    follower = SyncedRoutes(SharedRoutes(registry), file)
    await follower.start()
    await change(lanes, "alias", "chat", model=OTHER)
    await until(lambda: "chat" in follower.table.names, 1.0)
    await until(file.exists)
    await registry.send(("DEL", registry.key("routes")))
    reader = SharedRoutes(registry)

    async def restored() -> bool:
        found, _ = await reader.read(RouteTable())
        return found is not None and found.names == follower.table.names

    for _ in range(40):
        if await restored():
            break
        await asyncio.sleep(0.05)
    assert await restored()
    await follower.close()
    again = SyncedRoutes(SharedRoutes(registry), file)
    await again.start()
    assert again.table == follower.table
    await again.close()


async def test_only_operators_see_and_change_routes(two_lanes) -> None:
    keys = {
        "key-of-tenant": ApiKeyConfig(tenant="t"),
        "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
    }
    lanes = await two_lanes(api_keys=keys)
    http = lanes.fleet.http
    for key, status in (("key-of-tenant", 403), ("key-of-ops", 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await http.get("/fleet/models", headers=headers)).status_code == status
        body = {"verb": "alias", "name": "x", "model": OTHER}
        answer = await http.post("/fleet/models", json=body, headers=headers)
        assert answer.status_code == (403 if status == 403 else 503)  # there is no Redis


async def test_a_stored_conversation_stays_with_its_version(two_lanes, registry) -> None:
    limits = StoreLimits(keep_s=60, tenant_bytes=10**6, total_bytes=10**7)
    stored = StoredResponses(registry, limits)
    lanes = await two_lanes(registry=registry, responses=stored)
    await change(lanes, "canary", "smollm2", model=OTHER, share=0.5)
    models = set()
    for number in range(10):
        body = {"model": "smollm2", "max_output_tokens": 1}
        first = await lanes.post("/v1/responses", input=f"question {number}", **body)
        models.add(first.json()["model"])
        again = await lanes.post(
            "/v1/responses", input="and?", previous_response_id=first.json()["id"], **body
        )
        assert again.json()["model"] == first.json()["model"], again.text
    assert models == {"smollm2", OTHER}


async def test_usage_costs_what_the_workers_of_each_model_cost(two_lanes, registry) -> None:
    usage = SharedUsage(registry)
    lanes = await two_lanes(registry=registry, usage=usage, price=360.0)
    hour = int(time.time()) // HOUR_S
    ledger = Ledger("life")
    for lane, role in (("", "decode"), (OTHER, "decode")):
        ledger.row(RowName(hour, WORKERS, lane, role)).worker_ns = 10 * 10**9
    await usage.apply(ledger.report(hour))
    answer = await lanes.fleet.http.get("/fleet/usage")
    [idle] = [one for one in answer.json()["lines"] if one["tenant"] == IDLE]
    assert idle["worker_s"] == pytest.approx(20)
    assert idle["cost"] == pytest.approx(10 * 360 / 3600)  # workers of the first model are free


async def test_the_header_has_the_name_of_the_model_and_not_its_alias(lanes: TwoLanes) -> None:
    answer = await ask(lanes, "alias")
    assert answer.headers["x-baton-model"].startswith("smollm2; version=")
    report = (await lanes.fleet.http.get(f"/fleet/requests/{answer.json()['id']}")).json()
    assert (report["model"]["model"], report["model"]["requested"]) == ("smollm2", "alias")
    await change(lanes, "alias", "chat", model="alias")
    listed = (await lanes.fleet.http.get("/fleet/models")).json()
    assert listed["routes"]["chat"]["target"] == "smollm2"
