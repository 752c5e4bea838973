"""Limits of tenants at real routers with a real Redis, by `/fleet/tenants` and for clients."""

import asyncio
import json
import os
import signal
import time

import anthropic
import openai
import pytest

from baton.config.clients import ApiKeyConfig
from baton.tenants.limits import Limits
from router.frontend.operators.deletion import command
from router.tenants.quota_feed import QuotaFeed
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

OPS = {"authorization": "Bearer secret"}
TEAM = {"authorization": "Bearer key-of-team"}
KEYS = {"key-of-team": ApiKeyConfig(tenant="team"), "key-of-free": ApiKeyConfig(tenant="free")}


@pytest.fixture
def start(make_fleet, registry, monkeypatch):
    monkeypatch.setattr(command, "LIMIT_S", 1.5)  # its workers are scripts, and confirm nothing

    async def fleet_of(**more):
        return await make_fleet(
            {"decode-0": more.pop("script", Script(step_s=0.001))},
            api_keys=KEYS,
            registry=registry,
            **more,
        )

    return fleet_of


async def put(fleet, tenant: str = "team", status: int = 200, **limits) -> dict:
    answer = await fleet.http.put(f"/fleet/tenants/{tenant}", json=limits, headers=OPS)
    assert answer.status_code == status, answer.text
    return answer.json()


async def limits_of(fleet) -> dict:
    answer = await fleet.http.get("/fleet/tenants", headers=OPS)
    return {tenant.pop("tenant"): tenant for tenant in answer.json()["tenants"]}


def code_of(answer) -> str:
    return answer.json()["error"]["code"]


def policies(fleet) -> dict[str, Limits]:
    return dict(fleet.router.policies.all)


async def test_limits_are_set_changed_and_removed_at_all_routers(start) -> None:
    one, two = await start(), await start()
    none = Limits().fields()
    assert await put(one, rpm=600) == {"tenant": "team", **none, "rpm": 600}
    assert await put(one, tpm=400_000) == {"tenant": "team", **none, "rpm": 600, "tpm": 400_000}
    await until(lambda: policies(two) == policies(one), 1.0)
    assert await limits_of(two) == {"team": {**none, "rpm": 600, "tpm": 400_000}}
    await put(two, rpm=None)
    await put(two, "other", concurrent=2)
    assert set(await limits_of(two)) == {"team", "other"}
    await two.http.delete("/fleet/tenants/team", headers=OPS)
    assert not one.router.quotas.quotas.has_limits("team")
    assert set(await limits_of(one)) == {"other"}


async def test_changes_at_two_routers_at_once_are_all_kept(start) -> None:
    one, two = await start(), await start()
    names = [f"team-{number}" for number in range(8)]
    await asyncio.gather(
        *(put((one, two)[place % 2], name, rpm=place + 1) for place, name in enumerate(names))
    )
    await asyncio.sleep(0.6)
    for fleet in (one, two):
        found = {name: its["rpm"] for name, its in (await limits_of(fleet)).items()}
        assert found == {name: place + 1 for place, name in enumerate(names)}


async def test_wrong_limits_are_named(start) -> None:
    fleet = await start()
    for limits, message in (
        ({"rpm": -1}, "limits: Expected `int` >= 1 - at `$.rpm`"),
        ({"tpm": "many"}, "limits: Expected `int | null`, got `str` - at `$.tpm`"),
        ({"speed": 3}, "limits: Object contains unknown field `speed`"),
        ({"weight": 0}, "limits: Expected `float` >= 0.01 - at `$.weight`"),
        ({"models": []}, "limits: Expected `array` of length >= 1 - at `$.models`"),
        ({"budget": {}}, "limits: Object missing required field `tokens` - at `$.budget`"),
        (
            {},
            "limits: give some of rpm, tpm, tpd, concurrent, budget, weight, models, slo, "
            "kv_share, keep_s, log_text",
        ),
        ({"keep_s": -1}, "limits: Expected `int` >= 0 - at `$.keep_s`"),
        ({"log_text": "no"}, "limits: Expected `bool | null`, got `str` - at `$.log_text`"),
    ):
        error = (await put(fleet, status=400, **limits))["error"]
        assert error["message"] == message
    for body in (b'{"rpm":' + b"[" * 10_000, b"[1]", b"{", b'{"rpm":NaN}'):
        answer = await fleet.http.put("/fleet/tenants/team", content=body, headers=OPS)
        assert (answer.status_code, code_of(answer)) == (400, "invalid_request"), answer.text
    bad = (await put(fleet, "a%20b", status=400, rpm=1))["error"]
    assert bad["message"].startswith("tenant: must be 1 to 64 characters")


async def test_the_table_survives_redis_and_damage(start, registry, tmp_path) -> None:
    fleet = await start(state_dir=str(tmp_path))
    await put(fleet, rpm=3)
    await registry.send(("DEL", registry.key("tenants")))
    table = fleet.router.quotas.quotas

    async def written() -> bool:
        (found,) = await registry.send(("HGET", registry.key("tenants"), "table"))
        return found is not None and json.loads(found)["team"]["rpm"] == 3

    limit = time.monotonic() + 3
    while not await written():
        assert time.monotonic() < limit
        await asyncio.sleep(0.05)
    await registry.send(("HSET", registry.key("tenants"), "version", "9" * 13, "table", "no JSON"))
    await asyncio.sleep(0.7)
    assert table.has_limits("team"), "the last good table counts"
    assert "unreadable" in (await put(fleet, status=400, rpm=4))["error"]["message"]
    assert json.loads((tmp_path / "tenants.json").read_text())["tenants"]["team"]["rpm"] == 3


async def test_two_routers_share_a_limit_of_requests(start) -> None:
    one, two = await start(), await start()
    await put(one, rpm=10)
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    calls = [fleet.chat(headers=TEAM) for _ in range(10) for fleet in (one, two)]
    answers = await asyncio.gather(*calls)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(served), len(refused)) == (10, 10)
    assert {code_of(answer) for answer in refused} == {"rate_limit_exceeded"}
    assert all(1 <= int(answer.headers["retry-after"]) <= 62 for answer in refused)
    assert served[0].headers["x-ratelimit-limit-requests"] == "10"
    assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in served[0].headers
    free = await one.chat(headers={"authorization": "Bearer key-of-free"})
    assert free.status_code == 200 and "x-ratelimit-limit-requests" not in free.headers


async def test_the_first_call_of_an_idle_tenant_does_not_wait_for_redis(
    start, redis_server, monkeypatch
) -> None:
    one, two = await start(), await start()
    await put(one, rpm=100, tpm=50_000, concurrent=8)
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    await asyncio.sleep(1)
    monkeypatch.setattr(QuotaFeed, "_await_exchange", lambda *_, **__: pytest.fail("it waits"))
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        answers = [await fleet.chat(headers=TEAM) for fleet in (one, two)]
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_tokens_are_settled_by_usage_and_the_prompt_counts_once(start) -> None:
    fleet = await start()
    await put(fleet, tpm=1000)
    answer = await fleet.chat(headers=TEAM, n=3, max_tokens=100, stop=None)
    usage = answer.json()["usage"]
    standing = fleet.router.quotas.quotas.standing("team", time.monotonic_ns())["tpm"]
    assert 1000 - standing.remaining == usage["total_tokens"]
    assert usage["completion_tokens"] > 3
    left = int((await fleet.complete(headers=TEAM, max_tokens=1)).headers[REMAINING])
    assert left < 1000 - usage["total_tokens"]


REMAINING = "x-ratelimit-remaining-tokens"
CALLS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["hi", "ho"]}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/pooling", {"input": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_every_endpoint_that_computes_counts_one_request(start, path, body) -> None:
    fleet = await start()
    await put(fleet, rpm=1, tpm=1000)
    answers = [
        await fleet.http.post(path, json={"model": MODEL, **body}, headers=TEAM) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 429], answers[0].text
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"
    used = answers[0].json().get("usage", {}).get("total_tokens")
    if used:
        standing = fleet.router.quotas.quotas.standing("team", time.monotonic_ns())["tpm"]
        assert 1000 - standing.remaining == used


async def test_a_stream_counts_as_running_until_its_last_byte(start) -> None:
    fleet = await start(script=Script(step_s=0.02))
    await put(fleet, concurrent=1)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 20, "stream": True, "ignore_eos": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers=TEAM) as answer:
        assert answer.status_code == 200
        assert code_of(await fleet.complete(headers=TEAM)) == "rate_limit_exceeded"
        async for _ in answer.aiter_bytes():
            pass
    assert (await fleet.complete(headers=TEAM)).status_code == 200
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers=TEAM) as answer:
        assert answer.status_code == 200
    await asyncio.sleep(0.2)  # the router notices that the client has left
    assert (await fleet.complete(headers=TEAM)).status_code == 200, "a cancelled one is over"


async def test_an_exhausted_day_and_a_request_that_never_fits(start) -> None:
    fleet = await start()
    await put(fleet, tpd=20)
    big = await fleet.complete("hi " * 40, headers=TEAM, max_tokens=1)
    assert (big.status_code, code_of(big)) == (429, "request_exceeds_limit")
    assert "retry-after" not in big.headers and big.headers["x-should-retry"] == "false"
    first = await fleet.complete("hi", headers=TEAM, max_tokens=40, ignore_eos=True)
    assert first.status_code == 200, "its prompt fits; its answer is a debt"
    second = await fleet.complete("hi", headers=TEAM, max_tokens=4)
    error = second.json()["error"]
    assert (second.status_code, error["code"]) == (429, "insufficient_quota")
    assert error["type"] == "insufficient_quota"
    assert 0 < int(second.headers["retry-after"]) <= 24 * 3600


async def test_the_official_clients_read_the_limits(start) -> None:
    fleet = await start()
    await put(fleet, rpm=2, tpm=5000)
    url = f"{fleet.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="key-of-team", max_retries=0) as client:
        message = [{"role": "user", "content": "hi"}]
        raw = client.chat.completions.with_raw_response
        found = await raw.create(model=MODEL, messages=message, max_tokens=2)
        assert found.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(found.headers[REMAINING]) < 5000
        assert found.headers["x-ratelimit-reset-requests"].endswith("s")
        await client.chat.completions.create(model=MODEL, messages=message, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=message, max_tokens=2)
    assert caught.value.code == "rate_limit_exceeded"
    headers = caught.value.response.headers
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < int(headers["retry-after"]) <= 62
    async with anthropic.AsyncAnthropic(
        base_url=fleet.url, api_key="key-of-team", max_retries=0
    ) as other:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await other.messages.create(model=MODEL, messages=message, max_tokens=2)
    headers = refused.value.response.headers
    assert headers["anthropic-ratelimit-requests-limit"] == "2"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert headers["anthropic-ratelimit-tokens-reset"].endswith("Z")


async def test_without_redis_each_router_has_its_part(start, redis_server) -> None:
    one = await start()
    two = await start()
    await put(one, rpm=20)
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    one.lane.gateway.shares.known_routers = 2  # the demands of routers are not shared here
    assert "x-baton-quota" not in (await one.chat(headers=TEAM)).headers
    os.kill(redis_server.pid, signal.SIGSTOP)
    answers = [await one.chat(headers=TEAM) for _ in range(14)]
    served = [answer for answer in answers if answer.status_code == 200]
    assert 9 <= len(served) <= 10, "with the one before, half of 20"
    assert answers[-1].headers["x-baton-quota"] == "degraded"
    os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: not one.router.quotas.is_degraded, 10)
    await asyncio.sleep(1.5)  # unused leases return
    more = [await two.chat(headers=TEAM) for _ in range(14)]
    assert sum(answer.status_code == 200 for answer in more) == 20 - 1 - len(served)
    assert "x-baton-quota" not in more[-1].headers


async def used_tokens(fleet) -> int:
    await asyncio.sleep(0.05)  # settled after the last byte
    standing = fleet.router.quotas.quotas.standing("team", time.monotonic_ns())
    assert standing["rpm"].limit - standing["rpm"].remaining == 1
    return standing["tpm"].limit - standing["tpm"].remaining


async def test_a_response_that_moves_to_another_worker_counts_once(start) -> None:
    fleet = await start(script=Script(step_s=0.02))
    await fleet.add("decode-1", Script(step_s=0.02))
    await put(fleet, rpm=100, tpm=5000)
    call = asyncio.create_task(fleet.complete(headers=TEAM, max_tokens=40, ignore_eos=True))
    (active,) = await running(fleet)
    await until(lambda: active.record.completion_tokens > 5)
    first = active.record.route.decode_worker_id
    await fleet.workers.pop(first).stop()
    answer = await call
    assert answer.status_code == 200 and active.record.moves, "it went on elsewhere"
    assert await used_tokens(fleet) == answer.json()["usage"]["total_tokens"]


async def running(fleet) -> list:
    await until(lambda: fleet.lane.gateway.in_flight)
    return list(fleet.lane.gateway.kept.newest_first())


async def test_a_cancelled_response_counts_what_was_generated(start) -> None:
    fleet = await start(script=Script(step_s=0.02))
    await put(fleet, rpm=100, tpm=5000)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 500, "stream": True, "ignore_eos": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers=TEAM) as answer:
        async for _ in answer.aiter_bytes():
            break
    await until(lambda: not fleet.lane.gateway.in_flight)
    assert 2 <= await used_tokens(fleet) < 100


async def test_a_request_that_no_worker_received_costs_no_tokens(start) -> None:
    fleet = await start(default_timeout_s=0.3)
    await put(fleet, rpm=100, tpm=5000)
    await fleet.workers.pop("decode-0").stop()
    await until(lambda: not fleet.lane.gateway.workers.usable)  # else it may have received it
    answer = await fleet.complete(headers=TEAM, max_tokens=4)
    assert answer.status_code in (503, 504)
    assert await used_tokens(fleet) == 0


async def test_lines_of_batches_count_and_wait_for_the_limit(start, tmp_path) -> None:
    fleet = await start(state_dir=str(tmp_path))
    await put(fleet, rpm=2)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    call = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = "\n".join(json.dumps({"custom_id": str(number), **call}) for number in range(3))
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="key-of-team") as client:
        sent = await client.files.create(file=("a.jsonl", lines.encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=sent.id, endpoint="/v1/completions", completion_window="24h"
        )
        standing = fleet.router.quotas.quotas.standing
        await until(lambda: standing("team", time.monotonic_ns())["rpm"].remaining == 0)
        await asyncio.sleep(0.5)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        await put(fleet, rpm=100)
        while (found := await client.batches.retrieve(batch.id)).status != "completed":
            await asyncio.sleep(0.05)
        assert (found.request_counts.completed, found.request_counts.failed) == (3, 0)
        assert standing("team", time.monotonic_ns())["rpm"].remaining == 97


async def test_a_client_that_left_before_its_call_was_placed_is_not_served(make_fleet, registry):
    """It was submitted all the same, and the tenant paid for its prompt."""
    fleet = await make_fleet(
        {"decode-0": Script()},
        api_keys={"key-of-team": ApiKeyConfig(tenant="team")},
        registry=registry,
    )
    await fleet.http.put("/fleet/tenants/team", json={"tpm": 60_000}, headers=OPS)
    await until(lambda: fleet.router.quotas.quotas.has_limits("team"))
    reserve, waiting, left = fleet.router.quotas.reserve, asyncio.Event(), asyncio.Event()

    async def slowly(*call):  # as an exchange with a slow Redis
        waiting.set()
        await left.wait()
        return await reserve(*call)

    fleet.router.quotas.reserve = slowly
    body = json.dumps({"model": MODEL, "prompt": [500] * 700, "max_tokens": 100}).encode()
    port = fleet.server.servers[0].sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-of-team\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await waiting.wait()
    writer.close()
    connections = fleet.server.server_state.connections
    await until(lambda: len(connections) < 2)  # the fixture's own client is the other one
    left.set()
    await until(lambda: not fleet.server.server_state.tasks)
    assert fleet.workers["decode-0"].submissions == []
    used = (await fleet.http.get("/fleet/tenants?limit=5", headers=OPS)).json()["tenants"][0]
    assert used["used"].get("tpm", 0) == 0
