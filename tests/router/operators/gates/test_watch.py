"""Golden prompts and automatic rollback through the router's HTTP. Real Redis."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton.registry.gates import GateSums, SharedGates
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.shared_tables import SharedRoutes
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.types.gates import Evidence, GoldenRound, Tally
from fleet.local.redis_server import EmbeddedRedis
from router.lanes.route_table import SyncedRoutes
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS, until
from tests.router.emulated_worker import Script, answer_token
from tests.router.lanes.conftest import OTHER, TwoLanes, two_lanes
from tests.telemetry.values import value_of

__all__ = ["redis_server", "registry", "two_lanes"]

RIGHT = [answer_token(0, 0, index) for index in range(4)]
GOLDEN = {"name": "greeting", "prompt": "hi", "max_tokens": 4, "tokens": RIGHT}


@pytest.fixture
async def make_router(two_lanes, registry, tmp_path):
    """Start a router, which shares Redis with the others of a test."""

    async def make() -> TwoLanes:
        return await two_lanes(
            Script(),
            registry=registry,
            audit=AuditLog(AuditInbox(registry), tmp_path / "audit.jsonl"),
        )

    return make


@pytest.fixture
async def lanes(make_router) -> TwoLanes:
    return await make_router()


async def change(lanes: TwoLanes, verb: str, name: str, **more: Any) -> Any:
    return await lanes.fleet.http.post(
        "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
    )


async def listed(lanes: TwoLanes) -> Any:
    return (await lanes.fleet.http.get("/fleet/models")).json()


async def test_a_model_with_wrong_golden_answers_gets_no_request(lanes: TwoLanes) -> None:
    found = await change(lanes, "gate", OTHER, golden=[{**GOLDEN, "tokens": [1, 2, 3, 4]}])
    assert found.json()["golden"]["wrong"] == {"greeting": f"token 0 is {RIGHT[0]} instead of 1"}
    refused = await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    assert refused.status_code == 400
    assert "other gets no requests: 1 golden prompts failed; 'greeting': token 0" in refused.text
    assert (await lanes.fleet.chat("hi")).json()["model"] == "smollm2"
    assert (await change(lanes, "gate", OTHER, golden=[GOLDEN])).json()["golden"]["passed"]
    assert (await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)).status_code == 200
    assert (await lanes.fleet.chat("hi")).json()["model"] == OTHER


async def test_a_wrong_answer_in_traffic_takes_the_canary_out_of_every_router(
    lanes: TwoLanes, registry, caplog, tmp_path
) -> None:
    """The worker of the canary begins to give wrong answers while it serves."""
    follower = SyncedRoutes(SharedRoutes(registry))
    await follower.start()
    await change(lanes, "gate", OTHER, golden=[GOLDEN])
    await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    await until(lambda: "smollm2" in follower.table.names, 2.0)
    routes = lanes.fleet.router.routes
    state: dict[str, Any] = {}
    for _ in range(40):
        state = (await listed(lanes))["routes"]["smollm2"]["gate"]
        if state and state["golden"]:
            break
        await asyncio.sleep(0.1)
    assert state["golden"]["right"] == 1
    lanes.second.script.answer = [9, 9, 9, 9]
    began_s = time.monotonic()
    served = 0
    while routes.table.names["smollm2"].canary:
        answer = await lanes.fleet.chat(f"hi {served}", max_tokens=1)
        served += answer.json()["model"] == OTHER
        assert time.monotonic() - began_s < 10
    await until(lambda: not follower.table.names["smollm2"].canary, 1.0)
    answer = await lanes.fleet.chat("hi")
    assert answer.json()["model"] == "smollm2"
    reason = f"golden prompt 'greeting': token 0 is 9 instead of {RIGHT[0]}"
    assert f"why=rollback: {reason}" in answer.headers["x-baton-model"]
    report = (await lanes.fleet.http.get(f"/fleet/requests/{answer.json()['id']}")).json()
    assert report["model"]["why"] == f"rollback: {reason}"
    entry = (await listed(lanes))["routes"]["smollm2"]
    assert (entry["thrown_out"], entry["reason"], entry["gate"]) == (OTHER, reason, None)
    assert f"rolled back name=smollm2 canary=other: {reason}" in caplog.text
    page = (await lanes.fleet.http.get("/metrics")).text
    assert 'baton_model_rollbacks_total{model="other"} 1.0' in page
    assert 'result="wrong"' in page
    entries = list(map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines()))
    [entry] = [one for one in entries if one["verb"] == "models rollback"]
    assert (entry["what"], entry["after"]["reason"]) == ("smollm2", reason)
    assert entry["who"] == f"router {lanes.fleet.lane.gateway.router_id}"
    await follower.close()


async def test_a_canary_whose_requests_fail_is_rolled_back(lanes: TwoLanes) -> None:
    await change(lanes, "canary", "smollm2", model=OTHER, share=0.5)
    await until(lambda: lanes.fleet.router.gates.get("smollm2"), 2.0)
    lanes.second.script.fail = ("internal", "broken", False)
    for number in range(40):
        await lanes.fleet.chat(f"question {number}", max_tokens=1)
    names = lanes.fleet.router.routes.table.names
    await until(lambda: lanes.fleet.router.routes.table.names["smollm2"].thrown_out == OTHER)
    assert names["smollm2"].target == "smollm2"
    reason = lanes.fleet.router.routes.table.names["smollm2"].reason
    assert "requests failed, with the stable model 0 of" in reason


async def test_routers_decide_by_the_sum_of_their_evidence(make_router) -> None:
    """Six failed requests are needed without a baseline, and each router has three."""
    routers = [await make_router() for _ in range(2)]
    await change(routers[0], "canary", "smollm2", model=OTHER, share=1.0)
    for one in routers:
        await until(lambda one=one: one.fleet.router.gates.get("smollm2"), 2.0)
        one.second.script.fail = ("internal", "broken", False)
    for number in range(3):
        await routers[0].fleet.chat(f"question {number}", max_tokens=1)
    await asyncio.sleep(1.0)
    assert routers[0].fleet.router.routes.table.names["smollm2"].canary == OTHER
    for number in range(3):
        await routers[1].fleet.chat(f"question {number}", max_tokens=1)
    for one in routers:
        table = one.fleet.router.routes
        await until(lambda table=table: table.table.names["smollm2"].thrown_out == OTHER, 2.0)
        reason = table.table.names["smollm2"].reason
        assert reason == "6 of 6 requests failed, with the stable model 0 of 0"


class Forgetful(SharedGates):
    """Redis that does not answer when it is first sent evidence about the canary."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.lost: list[int] = []

    async def exchange(
        self, router_id: str, name: str, since_ms: int, fresh: Evidence, number: int
    ) -> GateSums:
        if fresh.canary.requests and not self.lost:
            self.lost.append(fresh.canary.requests)
            raise RegistryUnavailableError("away")
        return await super().exchange(router_id, name, since_ms, fresh, number)


async def test_no_evidence_is_lost_while_redis_does_not_answer(two_lanes, registry) -> None:
    shared = Forgetful(registry)
    lanes = await two_lanes(Script(), registry=registry, gates=shared)
    await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    gates = lanes.fleet.router.gates
    await until(lambda: gates.get("smollm2"), 2.0)
    for number in range(3):
        await lanes.fleet.chat(f"question {number}", max_tokens=1)
    await until(lambda: gates.get("smollm2").totals.canary.requests == 3, 3.0)
    assert len(shared.lost) == 1


@contextlib.contextmanager
def hanging(server: EmbeddedRedis) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_without_redis_a_router_stops_sending_to_a_canary_that_fails(
    lanes: TwoLanes, registry, redis_server, caplog, tmp_path
) -> None:
    """The others follow when Redis answers."""
    follower = SyncedRoutes(SharedRoutes(registry))
    await follower.start()
    await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    router = lanes.fleet.router
    await until(lambda: router.gates.get("smollm2") and "smollm2" in follower.table.names, 2.0)
    lanes.second.script.fail = ("internal", "broken", False)
    with hanging(redis_server):
        for number in range(6):
            assert (await lanes.fleet.chat(f"question {number}")).status_code == 500
        await until(lambda: not router.routes.table.names["smollm2"].canary, 1.0)
        answer = await lanes.fleet.chat("hi")
        assert answer.json()["model"] == "smollm2"
        reason = "6 of 6 requests failed, with the stable model 0 of 0"
        assert f"why=rollback: {reason}" in answer.headers["x-baton-model"]
        said = "rolled back at this router, and at the others when Redis answers: name=smollm2"
        assert f"{said} canary=other: {reason}" in caplog.text
        await asyncio.sleep(4.0)  # longer than a call waits for an answer
        assert follower.table.names["smollm2"].canary == OTHER
        assert caplog.text.count(said) == 1
    await until(lambda: follower.table.names["smollm2"].thrown_out == OTHER, 5.0)
    assert follower.table.names["smollm2"].reason == reason
    assert value_of(router.metrics, "baton_model_rollbacks", model=OTHER) == 1
    entries = list(map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines()))
    assert [one["what"] for one in entries if one["verb"] == "models rollback"] == ["smollm2"]
    await follower.close()
    lanes.second.script.fail = None
    assert (await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)).status_code == 200
    assert (await lanes.fleet.chat("hi")).json()["model"] == OTHER  # an operator may try again


async def test_without_redis_each_router_runs_the_golden_prompts(
    lanes: TwoLanes, redis_server
) -> None:
    await change(lanes, "gate", OTHER, golden=[GOLDEN])
    await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    routes = lanes.fleet.router.routes
    await until(lambda: lanes.fleet.router.gates.get("smollm2"), 2.0)
    with hanging(redis_server):
        await asyncio.sleep(3.5)  # until the lease of the router that runs them has lapsed
        lanes.second.script.answer = [9, 9, 9, 9]
        await until(lambda: routes.table.names["smollm2"].thrown_out == OTHER, 10.0)
    assert routes.table.names["smollm2"].reason.startswith("golden prompt 'greeting': token 0 is 9")


async def test_errors_that_clients_cause_are_no_evidence(lanes: TwoLanes) -> None:
    await change(lanes, "canary", "smollm2", model=OTHER, share=1.0)
    await until(lambda: lanes.fleet.router.gates.get("smollm2"), 2.0)
    lanes.second.script.fail = ("invalid_request", "refused by the worker", False)
    assert (await lanes.fleet.chat("hi")).status_code == 400
    lanes.second.script.fail = None
    await lanes.fleet.chat("hi", max_tokens=2)
    gate = lanes.fleet.router.gates.get("smollm2")
    await until(lambda: gate.totals.canary.requests == 1, 2.0)
    assert gate.totals.canary.errors == 0
    assert sum(gate.totals.canary.itl.values()) == 1


async def test_a_model_without_golden_prompts_has_none_to_run(lanes: TwoLanes) -> None:
    assert (await change(lanes, "gate", OTHER)).json()["golden"] is None
    assert (await change(lanes, "gate", "v9")).status_code == 404
    wrong = await change(lanes, "gate", OTHER, golden=[{"name": "a", "prompt": "b"}])
    assert wrong.status_code == 400
    assert "needs one of tokens, regex, schema and same_as" in wrong.text


async def test_tokens_equal_those_of_another_model(lanes: TwoLanes) -> None:
    golden = [{"name": "same", "prompt": "hi", "max_tokens": 4, "same_as": "smollm2"}]
    assert (await change(lanes, "gate", OTHER, golden=golden)).json()["golden"]["passed"]
    lanes.second.script.answer = [*RIGHT[:2], 7, 7]
    found = (await change(lanes, "gate", OTHER)).json()["golden"]
    assert found["wrong"] == {"same": f"token 2 is 7 instead of {RIGHT[2]}"}
    await lanes.first.stop()
    await until(lambda: not lanes.fleet.lane.gateway.workers.usable)
    lanes.second.script.answer = None
    again = [{**golden[0], "name": "again"}]
    found = (await change(lanes, "gate", OTHER, golden=again)).json()["golden"]
    assert found["failed"] == {"again": "smollm2 has no ready worker"}


async def test_routers_add_up_their_evidence_and_one_runs_the_golden_prompts(registry) -> None:
    shared = SharedGates(registry)
    tally = Tally(requests=3, errors=1, ttft={7: 2}, itl={4: 1})
    first = await shared.exchange("router-a", "chat", 5, Evidence(canary=tally), 1)
    assert (first.is_runner, first.evidence.canary, first.last_round) == (True, tally, None)
    found = GoldenRound(at_ms=8, right=2, wrong={"a": "b"})
    await shared.put_round("chat", 5, found)
    more = Evidence(canary=Tally(requests=1, ttft={7: 1}), stable=Tally(requests=9))
    second = await shared.exchange("router-b", "chat", 5, more, 1)
    assert not second.is_runner
    assert second.evidence.canary == Tally(requests=4, errors=1, ttft={7: 3}, itl={4: 1})
    assert second.evidence.stable.requests == 9
    assert second.last_round == found
    again = await shared.exchange("router-b", "chat", 5, more, 1)
    assert again.evidence == second.evidence, "sent again, because the answer was lost"
    other = await shared.exchange("router-b", "chat", 6, Evidence(), 1)
    assert (other.is_runner, other.evidence) == (True, Evidence())
    ttl_ms = (await registry.send(("PTTL", registry.key("gate:5:chat"))))[0]
    assert 0 < ttl_ms <= 24 * 3600 * 1000
    await registry.send(("DEL", registry.key("gate:5:chat:runner")))
    assert (await shared.exchange("router-b", "chat", 5, Evidence(), 2)).is_runner


async def test_golden_prompts_survive_a_redis_that_lost_them(lanes: TwoLanes, registry) -> None:
    await change(lanes, "gate", OTHER, golden=[GOLDEN])
    raw = (await registry.send(("HGET", registry.key("routes"), "golden")))[0]
    assert json.loads(raw)[OTHER][0]["tokens"] == RIGHT
    follower = SyncedRoutes(SharedRoutes(registry))
    await follower.start()
    assert follower.table.golden[OTHER][0].tokens == tuple(RIGHT)
    await follower.close()
    await registry.send(("DEL", registry.key("routes")))
    for _ in range(40):
        if (await registry.send(("HGET", registry.key("routes"), "golden")))[0] == raw:
            break
        await asyncio.sleep(0.1)
    assert (await registry.send(("HGET", registry.key("routes"), "golden")))[0] == raw
