"""Client processes: intended times count, shares add up, a lost client is noticed."""

import asyncio
import time
from itertools import pairwise

import msgspec
import pytest

from loadtest.client.processes import ClientFailedError, run_clients
from loadtest.client.records import CallRecord, ServerOptions
from loadtest.metrics.request_figures import ttft_s
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan
from tests.loadtest.tiny_server import Stream, tiny_server, words


def options(url: str, **changes: object) -> ServerOptions:
    return msgspec.structs.replace(ServerOptions(url=url, model="tiny"), **changes)


def even(requests: int, rate: float, **changes: object) -> Plan:
    fields = {"prompt_tokens": "8", "answer_tokens": "3", "cv": 0.0}
    load = OpenLoop(requests=requests, rate=rate, **{**fields, **changes})
    return open_loop_plan(load, name="even", seed=1)


async def send(plan: Plan, server: ServerOptions, **more) -> tuple[list[CallRecord], list]:
    records: list[CallRecord] = []
    arguments = {"clients": 1, "record": records.append, **more}
    reports = await run_clients(plan, server, **arguments)
    return sorted(records, key=lambda record: record.index), reports


async def test_two_clients_send_each_request_once_at_its_time():
    with tiny_server() as server:
        zero: list[float] = []
        records, reports = await send(
            even(20, 20.0), options(server.url), clients=2, on_start=zero.append
        )
        came_s = sorted(server.came_s)
    assert [record.index for record in records] == list(range(20))
    assert {record.client for record in records} == {0, 1}
    assert [report.requests for report in reports] == [10, 10]
    assert {record.end for record in records} == {"ok"}
    assert [record.prompt_tokens for record in records] == [8] * 20
    assert [record.intended_s for record in records] == pytest.approx(
        [(number + 1) / 20 for number in range(20)]
    )
    # On a busy machine some are late; none is early, and records say how late.
    for record, came in zip(records, came_s, strict=True):
        assert record.sent_s >= record.intended_s
        assert came - zero[0] == pytest.approx(record.sent_s, abs=0.25)


async def test_a_frozen_server_shows_in_every_request_meant_for_that_time():
    """Coordinated omission: a closed loop would have sent one request into the freeze."""
    frozen: list[tuple[float, float]] = []

    async def reply(body: dict, stream: Stream) -> None:
        if not frozen and time.monotonic() - zero[0] > 1.0:
            begin = time.monotonic()
            time.sleep(2.0)  # noqa: ASYNC251 - the whole server stands still
            frozen.append((begin - zero[0], time.monotonic() - zero[0]))
        await words(body, stream)

    zero: list[float] = []
    with tiny_server(reply) as server:
        records, _ = await send(even(40, 10.0), options(server.url), on_start=zero.append)
    [(begin, end)] = frozen
    within = [record for record in records if begin < record.intended_s < end]
    assert len(within) >= 18
    for record in within:
        assert ttft_s(record) >= end - record.intended_s - 0.01


async def test_a_conversation_waits_for_answers_and_carries_them_on():
    load = Sessions(
        users=1,
        sessions=2,
        turns=2,
        system_tokens=4,
        prompt_tokens="5",
        answer_tokens="2",
        think_s=0.05,
    )
    plan = session_plan(load, name="sessions", seed=3)
    with tiny_server() as server:
        records, _ = await send(plan, options(server.url))
        bodies = server.bodies
    assert [len(body["messages"]) for body in bodies] == [1, 3, 1, 3]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "w0 w1 "}
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]
    system = bodies[0]["messages"][0]["content"].split()[:4]
    assert bodies[2]["messages"][0]["content"].split()[:4] == system
    for before, after in pairwise(records):
        assert after.intended_s >= before.ended_s


async def test_tenants_and_options_reach_the_server():
    turns = [
        Turn(index=0, prompt=(Segment(1, 4),), max_tokens=1, tenant="hot"),
        Turn(index=1, prompt=(Segment(1, 4),), max_tokens=1, tenant="cold"),
    ]
    plan = Plan(
        name="two",
        seed=5,
        conversations=tuple(Conversation(start_s=0.1 * t.index, turns=(t,)) for t in turns),
    )
    with tiny_server() as server:
        changes = {"tenant_keys": {"hot": "k-hot"}, "api_key": "k", "headers": {"x-a": "b"}}
        records, _ = await send(plan, options(server.url, endpoint="completions", **changes))
        hot, cold = server.headers
        bodies = server.bodies
    assert (hot["authorization"], cold["authorization"]) == ("bearer k-hot", "bearer k")
    assert hot["x-a"] == "b"
    assert (hot.get("x-baton-tenant"), cold["x-baton-tenant"]) == (None, "cold")
    assert [body.get("user") for body in bodies] == [None, "cold"]
    assert bodies[0]["prompt"] == bodies[1]["prompt"]
    assert bodies[0]["ignore_eos"] is True
    assert [record.tenant for record in records] == ["hot", "cold"]


async def test_a_client_that_cannot_go_on_fails_the_run():
    with pytest.raises(ClientFailedError, match="not an http"):
        await send(even(1, 10.0), options("nonsense"))


async def test_an_early_end_leaves_no_process_and_no_request():
    with tiny_server() as server:
        async with asyncio.timeout(None) as limit:
            loop = asyncio.get_running_loop()

            def started(zero_s: float) -> None:
                limit.reschedule(loop.time() + 1.0)

            with pytest.raises(asyncio.CancelledError):
                await send(even(200, 20.0), options(server.url), on_start=started)
            asyncio.current_task().uncancel()
        seen = len(server.bodies)
        await asyncio.sleep(0.3)
        assert 0 < seen < 60
        assert len(server.bodies) == seen
