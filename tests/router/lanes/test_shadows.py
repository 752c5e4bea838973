"""Shadow traffic through the router's HTTP: copies that answer no client. Real Redis."""

import asyncio
import re
from typing import Any

import pytest

from baton.registry.gates import SharedGates
from baton.types.gates import Evidence, Tally
from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError
from router.lanes.comparison import bucket_of
from router.lanes.gate import Gate, Outcome
from router.lanes.routes import (
    rolled_back,
    route,
    thrown_out,
    with_alias,
    with_canary,
    with_shadow,
)
from router.lanes.shadow import LAST
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import OPS, until
from tests.router.emulated_worker import Script
from tests.router.lanes.conftest import OTHER, TwoLanes

__all__ = ["redis_server", "registry"]

PLAIN = {"temperature": 0}
PARENT = f"00-{5:032x}-{7:016x}-01"


@pytest.fixture
async def lanes(two_lanes, registry) -> TwoLanes:
    return await two_lanes(
        Script(),
        registry=registry,
    )


async def change(lanes: TwoLanes, verb: str, name: str, **more: Any) -> Any:
    return await lanes.fleet.http.post(
        "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
    )


async def shadowed(lanes: TwoLanes, share: float = 1.0) -> None:
    """Let the other model run copies of the first one's requests."""
    answer = await change(lanes, "shadow", "smollm2", model=OTHER, share=share)
    assert answer.status_code == 200, answer.text
    await until(lambda: lanes.fleet.router.gates.get("smollm2"), 2.0)


async def results(lanes: TwoLanes) -> dict[str, float]:
    page = (await lanes.fleet.http.get("/metrics")).text
    found = {}
    for line in page.splitlines():
        if line.startswith("baton_shadow_requests_total{"):
            found[line.partition('result="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    return found


async def until_counted(lanes: TwoLanes, count: int) -> dict[str, float]:
    for _ in range(200):
        found = await results(lanes)
        if sum(found.values()) == count:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"{found} instead of {count} copies")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ],
)
async def test_a_copy_runs_after_the_answer_at_the_lowest_priority(
    lanes: TwoLanes, path: str, body: dict[str, Any]
) -> None:
    await shadowed(lanes)
    body = {"model": "smollm2", "max_tokens": 3, **body}
    if path == "/v1/responses":
        del body["max_tokens"]
    answer = await lanes.fleet.http.post(path, json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 200, answer.text
    if "stream" not in body:
        assert answer.json()["model"] == "smollm2"
    assert answer.headers["x-baton-model"].endswith("why=named")
    await until_counted(lanes, 1)
    [real] = lanes.first.submissions
    [copy] = lanes.second.submissions
    assert copy.priority == LAST
    assert (real.priority, copy.probe) == (0, False)
    assert copy.tenant != real.tenant
    assert real.traceparent
    assert not copy.traceparent


async def test_greedy_answers_are_compared_and_shown(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    await lanes.fleet.complete("hi", max_tokens=3, **PLAIN)
    assert await until_counted(lanes, 1) == {"same": 1}
    lanes.second.script.answer = [5, 6, 7]
    await lanes.fleet.complete("hi", max_tokens=3, **PLAIN)
    assert await until_counted(lanes, 2) == {"same": 1, "different": 1}
    await lanes.fleet.complete("hi", max_tokens=3, temperature=1)
    assert await until_counted(lanes, 3) == {"same": 1, "different": 1, "answered": 1}
    gate = lanes.fleet.router.gates.get("smollm2")
    await until(lambda: gate.totals.canary.requests == 3, 2.0)
    entry = (await lanes.fleet.http.get("/fleet/models")).json()["routes"]["smollm2"]
    assert (entry["shadow"], entry["shadow_share"], entry["canary"]) == (OTHER, 1.0, "")
    assert (entry["gate"]["canary"]["same"], entry["gate"]["canary"]["different"]) == (1, 1)
    assert entry["gate"]["canary"]["ttft_p95_s"] > 0
    assert entry["gate"]["stable"]["requests"] == 3


async def test_prompts_with_other_tokens_are_not_compared(lanes: TwoLanes) -> None:
    """The chat template of the other model is another one."""
    await shadowed(lanes)
    await lanes.fleet.chat("hi", max_tokens=3, **PLAIN)
    assert await until_counted(lanes, 1) == {"answered": 1}
    assert lanes.first.submissions[0].prompt_tokens != lanes.second.submissions[0].prompt_tokens


async def test_copies_are_in_no_usage_report_or_metric_of_requests(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    for number in range(3):
        await lanes.fleet.complete(f"hi {number}", max_tokens=3, **PLAIN)
    await until_counted(lanes, 3)
    ledger = lanes.fleet.router.usage_counter.ledger
    fields = [field for rows in ledger.fields().values() for field in rows]
    assert len(fields) == 1
    assert "smollm2" in fields[0]
    page = (await lanes.fleet.http.get("/metrics")).text
    assert 'baton_generation_tokens_total{tenant="default"} 9.0' in page
    assert "shadow traffic" not in page
    kept = (await lanes.fleet.http.get("/fleet/requests")).json()
    assert len(kept["requests"]) == 3


async def test_errors_of_the_shadow_end_it_and_no_client_sees_them(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    lanes.second.script.fail = ("internal", "broken", False)
    for number in range(12):
        answer = await lanes.fleet.complete(f"hi {number}", max_tokens=2, **PLAIN)
        assert answer.status_code == 200
        assert answer.headers["x-baton-model"].endswith("why=named")
    assert set(await results(lanes)) == {"failed"}
    names = lanes.fleet.router.routes
    await until(lambda: not names.table.names["smollm2"].shadow_share, 2.0)
    entry = names.table.names["smollm2"]
    assert "requests failed" in entry.reason
    assert (entry.target, entry.shadow, entry.thrown_out) == ("smollm2", OTHER, "")
    count = len(lanes.second.submissions)
    answer = await lanes.fleet.complete("hi", max_tokens=2, **PLAIN)
    assert answer.headers["x-baton-model"].endswith("why=named")
    await asyncio.sleep(0.1)
    assert len(lanes.second.submissions) == count
    page = (await lanes.fleet.http.get("/metrics")).text
    assert 'baton_model_rollbacks_total{model="other"} 1.0' in page


async def test_a_wrong_golden_answer_ends_a_shadow(lanes: TwoLanes) -> None:
    await change(
        lanes,
        "gate",
        OTHER,
        golden=[{"name": "a", "prompt": "hi", "max_tokens": 2, "tokens": [1, 2]}],
    )
    await shadowed(lanes)
    names = lanes.fleet.router.routes
    await until(lambda: not names.table.names["smollm2"].shadow_share, 3.0)
    assert names.table.names["smollm2"].reason.startswith("golden prompt 'a': token 0")


async def test_a_request_that_does_not_fit_the_shadow_is_refused_there(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    long = "word " * 100  # more than the context of the other model
    assert (await lanes.fleet.complete(long, max_tokens=2, **PLAIN)).status_code == 200
    assert await until_counted(lanes, 1) == {"refused": 1}
    gate = lanes.fleet.router.gates.get("smollm2")
    await asyncio.sleep(0.4)
    assert gate.totals.canary.requests == 0


async def test_nothing_is_copied_while_the_shadow_has_no_worker(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    await lanes.second.stop()
    [_, lane] = lanes.fleet.router.lanes
    await until(lambda: not lane.gateway.workers.usable)
    assert (await lanes.fleet.complete("hi", max_tokens=2, **PLAIN)).status_code == 200
    assert await until_counted(lanes, 1) == {"left_out": 1}


async def test_a_shadow_that_is_served_no_more_fails_no_request(lanes: TwoLanes) -> None:
    routes = lanes.fleet.router.routes
    await routes.change(lambda table, _: with_shadow(table, "smollm2", "unloaded-adapter", 1.0))
    assert (await lanes.fleet.complete("hi", max_tokens=2, **PLAIN)).status_code == 200


async def test_a_client_that_left_is_not_copied(lanes: TwoLanes) -> None:
    await shadowed(lanes)
    lanes.first.script.step_s = 0.05
    body = {"model": "smollm2", "prompt": "hi", "max_tokens": 40, "stream": True}
    async with lanes.fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await until(lambda: lanes.first.cancels, 3.0)
    await asyncio.sleep(0.1)
    assert not lanes.second.submissions
    assert await results(lanes) == {}


async def test_requests_of_clients_take_the_places_of_copies(two_lanes, registry) -> None:
    """The window of the other model has two places, which two copies hold."""
    lanes = await two_lanes(
        Script(),
        registry=registry,
        window_requests=2,
    )
    await shadowed(lanes)
    lanes.second.script.step_s = 0.2
    for number in range(3):
        await lanes.fleet.complete(f"hi {number}", max_tokens=20, **PLAIN)
    [_, lane] = lanes.fleet.router.lanes
    assert await until_counted(lanes, 1) == {"left_out": 1}
    assert lane.gateway.in_flight == 2
    copies = [one.request_id for one in lanes.second.submissions]
    lanes.second.script.step_s = 0.005
    answer = await lanes.fleet.complete("real", model=OTHER, max_tokens=2)
    assert answer.status_code == 200
    assert [one.request_id for one in lanes.second.cancels] == copies[1:]  # the newest only
    assert await until_counted(lanes, 2) == {"left_out": 2}


async def test_no_copy_starts_while_requests_of_clients_wait(two_lanes, registry) -> None:
    lanes = await two_lanes(
        Script(),
        registry=registry,
        window_requests=2,
    )
    await shadowed(lanes)
    lanes.second.script.step_s = 0.1
    async with asyncio.TaskGroup() as group:
        for choices in (1, 2):  # the second does not fit, although a place is free
            real = lanes.fleet.complete("real", model=OTHER, max_tokens=5, n=choices)
            group.create_task(real)
        [_, lane] = lanes.fleet.router.lanes
        await until(lambda: lane.gateway.admission.waiting == 1)
        await lanes.fleet.complete("hi", max_tokens=2, **PLAIN)
        assert await until_counted(lanes, 1) == {"left_out": 1}
    assert len(lanes.second.submissions) == 2


async def test_a_shadow_ends_by_rollback_or_a_canary(lanes: TwoLanes) -> None:
    await shadowed(lanes, 0.5)
    refused = await change(lanes, "unload", OTHER)
    assert "smollm2 leads to other" in refused.text
    assert (await change(lanes, "rollback", "smollm2")).json()["route"] is None
    await shadowed(lanes)
    entry = (await change(lanes, "canary", "smollm2", model=OTHER, share=0.5)).json()["route"]
    assert (entry["canary"], entry["shadow"]) == (OTHER, "")
    refused = await change(lanes, "shadow", "smollm2", model=OTHER, share=0.5)
    assert "smollm2 has the canary other" in refused.text


def test_copies_follow_conversations_and_their_share() -> None:
    table = with_shadow(RouteTable(), "chat", "v2", 0.25, now_ms=5)
    table = with_shadow(with_alias(table, "chat", "v1"), "chat", "v2", 0.25, now_ms=5)
    routes = [route(table, "chat", "t", lambda n=n: str(n), lambda _: True) for n in range(10_000)]
    copied = sum(one.shadow == "v2" for one in routes)
    assert abs(copied / 10_000 - 0.25) < 0.01
    assert {(one.model, one.why) for one in routes} == {("v1", "alias")}
    more = with_shadow(table, "chat", "v2", 0.5, now_ms=9)
    assert more.names["chat"].since_ms == 5
    for number, before in enumerate(routes[:1000]):
        now = route(more, "chat", "t", lambda n=number: str(n), lambda _: True)
        assert now.shadow or not before.shadow


@pytest.mark.parametrize("share", [None, 0.0, 1.5])
def test_a_shadow_needs_a_share(share: float | None) -> None:
    with pytest.raises(TableChangeError, match="needs a share above 0"):
        with_shadow(RouteTable(), "chat", "v2", share)


def test_a_shadow_does_not_copy_its_own_requests() -> None:
    with pytest.raises(TableChangeError, match="v2 already answers"):
        with_shadow(with_alias(RouteTable(), "chat", "v2"), "chat", "v2", 0.1)


def test_a_shadow_that_was_ended_can_begin_again_and_its_end_is_no_rollback() -> None:
    table = with_shadow(with_alias(RouteTable(), "chat", "v1"), "chat", "v2", 1.0, now_ms=5)
    entry = table.names["chat"]
    ended = thrown_out(table, "chat", entry, "6 of 6 requests failed")
    assert ended.names["chat"].candidate == ""
    assert route(ended, "chat", "t", str, lambda _: True).why == "alias"
    with pytest.raises(TableChangeError, match="no longer the shadow"):
        thrown_out(ended, "chat", entry, "again")
    with pytest.raises(TableChangeError, match="nothing to roll back"):
        rolled_back(ended, "chat")
    again = with_shadow(ended, "chat", "v2", 0.5, now_ms=8)
    assert (again.names["chat"].since_ms, again.names["chat"].reason) == (8, "")
    assert with_canary(again, "chat", "v2", 0.5, now_ms=9).names["chat"].since_ms == 9


def test_a_gate_of_a_shadow_takes_pairs_only() -> None:
    gate = Gate("chat", NameRoute(target="v1", shadow="v2", shadow_share=0.5, since_ms=7))
    gate.ended("v1", Outcome(failed=True))
    assert gate.take() == (1, Evidence())
    gate.confirmed()
    gate.compared(Outcome(failed=False, ttft_s=0.2), Outcome(failed=False, ttft_s=0.1), same=True)
    gate.compared(Outcome(failed=False), Outcome(failed=False), same=False)
    gate.compared(Outcome(failed=True), Outcome(failed=False), same=None)
    _, taken = gate.take()
    canary = taken.canary
    assert (canary.requests, canary.errors, canary.same, canary.different) == (3, 1, 1, 1)
    assert (taken.stable.requests, taken.stable.errors) == (3, 0)
    assert sum(canary.ttft.values()) == sum(taken.stable.ttft.values()) == 1


@pytest.mark.parametrize("ended", [{"canary": "v2", "share": 0.5}, {"shadow": "v2"}])
def test_latencies_end_a_canary_but_no_shadow(ended: dict[str, Any]) -> None:
    gate = Gate("chat", NameRoute(target="v1", since_ms=7, **ended))
    slow = Evidence(
        canary=Tally(requests=200, ttft={bucket_of(2.0): 200}),
        stable=Tally(requests=200, ttft={bucket_of(0.5): 200}),
    )
    reason = gate.judge(slow)
    if gate.entry.shadow:
        assert reason == ""
    else:
        assert re.fullmatch(r"p95 TTFT is 2\d{3} ms, with the stable model \d{3}.* ms", reason), (
            reason
        )


async def test_routers_add_up_compared_answers(registry) -> None:
    shared = SharedGates(registry)
    await shared.exchange(
        "a", "chat", 5, Evidence(canary=Tally(requests=2, same=1, different=1)), 1
    )
    found = await shared.exchange("b", "chat", 5, Evidence(canary=Tally(requests=1, same=1)), 1)
    assert found.evidence.canary == Tally(requests=3, same=2, different=1)


def test_an_earlier_router_reads_a_table_with_a_shadow() -> None:
    """It ignores the shadow, and never takes it for a canary."""
    import msgspec

    entry = NameRoute(target="v1", shadow="v2", shadow_share=0.5, since_ms=7)
    earlier = msgspec.json.decode(msgspec.json.encode(entry), type=dict)
    assert "canary" not in earlier
    assert earlier == {"target": "v1", "since_ms": 7, "shadow": "v2", "shadow_share": 0.5}
