"""Usage of tenants at real routers with a real Redis: the export has what the answers said."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from types import SimpleNamespace
from typing import Self

import openai
import pytest

from baton.config.clients import ApiKeyConfig
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.tenants.usage.ledger import HOUR_S
from baton.tenants.usage.shared import SharedUsage
from fleet.local.redis_server import EmbeddedRedis
from router.frontend.operators import usage as usage_calls
from tests.registry.conftest import redis_server, registry
from tests.registry.relay import Relay
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

KEYS = {
    "key-of-team": ApiKeyConfig(tenant="team"),
    "key-of-free": ApiKeyConfig(tenant="free"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
OPS = {"authorization": "Bearer key-of-ops"}
TENANTS = ("team", "free")
FIELDS = ("requests", "input", "cached", "output", "reasoning")


def headers_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}"}


@pytest.fixture
def start(make_fleet, registry):
    async def fleet_of(workers=None, **more):
        return await make_fleet(
            workers or {"decode-0": Script(step_s=0.001, cached_tokens=3)},
            api_keys=KEYS,
            registry=registry,
            **more,
        )

    return fleet_of


async def page(fleet, headers=OPS, status: int = 200, **query):
    query = {"start_time": int(time.time()) - HOUR_S, "bucket_width": "1h"} | query
    found = await fleet.http.get(
        "/v1/organization/usage/completions", params=query, headers=headers
    )
    assert found.status_code == status, found.text
    return found.json()


async def lines(fleet, headers=OPS, *, idle: bool = False, **query) -> list[dict]:
    found = await fleet.http.get("/fleet/usage", params=query, headers=headers)
    assert found.status_code == 200, found.text
    return [line for line in found.json()["lines"] if idle or line["tenant"] != "(idle)"]


class Answers:
    """The sum of what answers say about their usage, by tenant."""

    def __init__(self) -> None:
        self.sums = {tenant: dict.fromkeys(FIELDS, 0) for tenant in TENANTS}

    def add(self, tenant: str, *figures: int) -> None:
        for field, figure in zip(FIELDS, (1, *figures), strict=True):
            self.sums[tenant][field] += figure

    def openai(self, tenant: str, usage: dict) -> None:
        self.add(
            tenant,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            usage["completion_tokens_details"]["reasoning_tokens"],
        )


class Clients:
    """Calls of every kind, whose answers are added up."""

    def __init__(self, fleets, seed: int) -> None:
        self.fleets = fleets
        self.answers = Answers()
        self.refused = 0
        self.running: set[asyncio.Task] = set()
        self._random = random.Random(seed)

    async def many(self, count: int, at_once: int) -> None:
        places = asyncio.Semaphore(at_once)
        kinds = (self.chat, self.stream, self.completions, self.messages, self.responses)
        kinds += (self.left, self.wrong, self.embeddings)

        async def one(number: int) -> None:
            async with places:
                task = asyncio.current_task()
                self.running.add(task)
                task.add_done_callback(self.running.discard)
                call = kinds[number % len(kinds)]
                await call(self._random.choice(self.fleets), self._random.choice(TENANTS))

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))

    def _chat_body(self) -> dict:
        words = " ".join(["word"] * self._random.randint(1, 30))
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self._random.randint(1, 8),
        }

    async def _post(self, fleet, tenant: str, path: str, body: dict) -> dict:
        found = await fleet.http.post(path, json=body, headers=headers_of(tenant))
        assert found.status_code == 200, found.text
        return found.json()

    async def chat(self, fleet, tenant: str) -> None:
        body = self._chat_body() | {"n": self._random.randint(1, 3)}
        found = await self._post(fleet, tenant, "/v1/chat/completions", body)
        self.answers.openai(tenant, found["usage"])

    async def stream(self, fleet, tenant: str) -> None:
        body = self._chat_body() | {"stream": True, "stream_options": {"include_usage": True}}
        found = await fleet.http.post("/v1/chat/completions", json=body, headers=headers_of(tenant))
        assert found.status_code == 200, found.text
        assert len(events_of(found.text)) > 1, found.text
        self.answers.openai(tenant, events_of(found.text)[-2]["usage"])

    async def completions(self, fleet, tenant: str) -> None:
        body = {
            "model": MODEL,
            "prompt": ["one and two and three", "four or five or six"],
            "max_tokens": 3,
            "n": 2,
        }
        found = await self._post(fleet, tenant, "/v1/completions", body)
        self.answers.openai(tenant, found["usage"])

    async def messages(self, fleet, tenant: str) -> None:
        usage = (await self._post(fleet, tenant, "/v1/messages", self._chat_body()))["usage"]
        cached = usage["cache_read_input_tokens"]
        self.answers.add(tenant, usage["input_tokens"] + cached, cached, usage["output_tokens"], 0)

    async def responses(self, fleet, tenant: str) -> None:
        body = {
            "model": MODEL,
            "input": "hello to all of you",
            "max_output_tokens": 4,
            "store": False,
        }
        usage = (await self._post(fleet, tenant, "/v1/responses", body))["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        reasoning = usage["output_tokens_details"]["reasoning_tokens"]
        self.answers.add(tenant, usage["input_tokens"], cached, usage["output_tokens"], reasoning)

    async def embeddings(self, fleet, tenant: str) -> None:
        body = {"model": MODEL, "input": ["one and two and three", "four or five or six"]}
        usage = (await self._post(fleet, tenant, "/v1/embeddings", body))["usage"]
        self.answers.add(tenant, usage["prompt_tokens"], 2 * 3, 0, 0)  # 3 cached of each input

    async def left(self, fleet, tenant: str) -> None:
        """A client that leaves during a stream pays for what was generated until then."""
        body = self._chat_body() | {"stream": True, "max_tokens": 100}
        url = "/v1/chat/completions"
        async with fleet.http.stream("POST", url, json=body, headers=headers_of(tenant)) as answer:
            async for line in answer.aiter_lines():
                if "content" in line:
                    break
            request_id = answer.headers["x-request-id"]
        active = fleet.lane.gateway.kept.get(request_id)
        for _ in range(500):
            if active.delivered_ns:
                break
            await asyncio.sleep(0.01)
        record = active.record
        assert 0 < record.completion_tokens < 100
        figures = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        self.answers.add(tenant, *figures, record.reasoning_tokens)

    async def wrong(self, fleet, tenant: str) -> None:
        body = self._chat_body() | {"max_tokens": -1}
        found = await fleet.http.post("/v1/chat/completions", json=body, headers=headers_of(tenant))
        assert found.status_code == 400
        self.refused += 1


async def exported(fleet) -> dict[str, dict[str, int]]:
    found = {tenant: dict.fromkeys(FIELDS, 0) for tenant in TENANTS}
    for line in await lines(fleet):
        if line["tenant"] in TENANTS:
            found[line["tenant"]] = {
                field: line[name]
                for field, name in zip(
                    FIELDS,
                    ("requests", *(f"{name}_tokens" for name in FIELDS[1:])),
                    strict=True,
                )
            }
    return found


async def run_identity(start, count: int) -> None:
    script = Script(step_s=0.002, cached_tokens=3)
    fleets = [await start({"decode-0": script, "decode-1": script}) for _ in range(2)]
    clients = Clients(fleets, seed=7)
    calls = asyncio.create_task(clients.many(count, at_once=24))
    for number in range(4):  # workers die under the requests, which others resume or begin again
        await asyncio.sleep(0.4)
        fleet = fleets[number % 2]
        name = f"decode-{number // 2}"
        await fleet.workers[name].stop()
        fleet.directory.remove(name)
        await fleet.add(f"{name}-{number}", script)
        if held := set(clients.running):
            await asyncio.wait(held)  # a request that loses two workers fails
    await calls
    await fleets[1].router.usage.flush()
    assert await exported(fleets[0]) == clients.answers.sums
    buckets = (await page(fleets[0], group_by="project_id"))["data"]
    results = [result for bucket in buckets for result in bucket["results"]]
    for tenant, sums in clients.answers.sums.items():
        own = [result for result in results if result["project_id"] == tenant]
        assert sum(result["num_model_requests"] for result in own) == sums["requests"]
        assert sum(result["input_tokens"] for result in own) == sums["input"]
        assert sum(result["input_cached_tokens"] for result in own) == sums["cached"]
        assert sum(result["output_tokens"] for result in own) == sums["output"]
    refused = [line["refusals"].get("invalid_request", 0) for line in await lines(fleets[0])]
    assert sum(refused) == clients.refused
    moves = [
        float(line.split()[-1])
        for fleet in fleets
        for line in (await fleet.http.get("/metrics", headers=OPS)).text.splitlines()
        if line.startswith(("baton_migrations_total", "baton_retries_total"))
    ]
    assert sum(moves) > 0


@pytest.mark.long
async def test_the_export_is_the_sum_of_all_answers(start) -> None:
    await run_identity(start, 1000)


async def test_a_key_is_shown_by_its_id_and_never_itself(start) -> None:
    fleet = await start()
    await fleet.chat(headers=headers_of("team"))
    (line,) = await lines(fleet, by="tenant,key,model")
    digest = hashlib.sha256(b"key-of-team").hexdigest()[:12]
    assert (line["tenant"], line["key"], line["model"]) == ("team", f"file-{digest}", MODEL)


async def test_the_official_client_reads_all_pages(start) -> None:
    fleet = await start()
    hour = int(time.time()) // HOUR_S  # the calls end in this one or in the next
    for _ in range(2):
        await fleet.chat(headers=headers_of("team"))
    client = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x", admin_api_key="key-of-ops")
    usage = client.admin.organization.usage
    start_s = hour * HOUR_S - 3 * HOUR_S
    query = {"start_time": start_s + 600, "end_time": start_s + 5 * HOUR_S - 600}
    query |= {"bucket_width": "1h"}
    found = []
    cursor = openai.omit
    while True:
        page = await usage.completions(
            **query, limit=2, group_by=["project_id", "model"], page=cursor
        )
        found += page.data
        if not page.has_more:
            break
        cursor = page.next_page
    assert [bucket.end_time - bucket.start_time for bucket in found] == [HOUR_S] * 5
    assert found[0].start_time == start_s
    assert not any(bucket.results for bucket in found[:3])
    results = [result for bucket in found[3:] for result in bucket.results]
    assert {(one.project_id, one.model, one.api_key_id) for one in results} == {
        ("team", MODEL, None)
    }
    assert sum(one.num_model_requests for one in results) == 2
    assert sum(one.output_tokens for one in results) == 8
    own = await usage.completions(**query, project_ids=["free"])
    assert not any(bucket.results for bucket in own.data)
    await client.close()


async def test_the_first_second_of_an_hour_is_in_its_bucket(start, monkeypatch) -> None:
    fleet = await start()
    at_s = int(time.time()) // (24 * HOUR_S) * 24 * HOUR_S
    monkeypatch.setattr(usage_calls, "time", SimpleNamespace(time=lambda: at_s + 0.5))
    for width in ("1h", "1d"):
        found = await page(fleet, start_time=at_s, bucket_width=width)
        assert [bucket["start_time"] for bucket in found["data"]] == [at_s]
    answer = await fleet.http.get("/fleet/usage", headers=OPS)
    assert answer.json()["end_time"] == at_s + HOUR_S


async def test_a_tenant_sees_only_itself(start) -> None:
    fleet = await start()
    for tenant in TENANTS:
        await fleet.chat(headers=headers_of(tenant))
    found = await page(fleet, headers_of("free"), group_by="project_id")
    assert [r["project_id"] for b in found["data"] for r in b["results"]] == ["free"]
    found = await page(fleet, headers_of("free"), project_ids="team")
    assert not any(bucket["results"] for bucket in found["data"])
    assert [line["tenant"] for line in await lines(fleet, headers_of("free"))] == ["free"]


async def test_wrong_queries_are_refused(start) -> None:
    fleet = await start()
    for query, said in (
        ({"bucket_width": "1m"}, "bucket_width: must be 1h or 1d, since usage is kept by the hour"),
        ({"limit": 169}, "limit: must be from 1 to 168 (got 169)"),
        ({"start_time": "yesterday"}, "start_time: must be a number, at least 0"),
        ({"end_time": 5}, "end_time: must be after start_time"),
        ({"group_by": "user_id"}, "group_by: 'user_id' is none of project_id, api_key_id"),
        ({"user_ids": "me"}, "user_ids: usage is not kept by user"),
    ):
        found = await page(fleet, status=400, **query)
        assert said in found["error"]["message"]
    answer = await fleet.http.get("/fleet/usage", params={"by": "user"}, headers=OPS)
    assert answer.json()["error"]["message"].startswith("by: 'user' is none of hour, tenant")


async def test_refusals_are_counted_by_code(start) -> None:
    fleet = await start({"decode-0": Script(fail=("context_full", "full", False))})
    assert (await fleet.chat(headers=headers_of("team"))).status_code >= 400
    assert (await fleet.chat(headers=headers_of("team"), n=-1)).status_code == 400
    assert (await fleet.chat(headers={"authorization": "Bearer wrong"})).status_code == 401
    found = {}
    for line in await lines(fleet):
        assert line["tenant"] == "team"
        found |= line["refusals"]
        assert line["requests"] == line["input_tokens"] == 0
    assert found.pop("invalid_request") == 1
    assert list(found.values()) == [1]


class Unavailable(SharedUsage):
    """Usage in a Redis that is away for a time."""

    away = False

    async def apply(self, *arguments) -> int:
        if self.away:
            raise RegistryUnavailableError("away")
        return await super().apply(*arguments)

    async def read(self, hours):
        if self.away:
            raise RegistryUnavailableError("away")
        return await super().read(hours)


async def test_without_redis_usage_is_kept_and_reported_later(make_fleet, registry) -> None:
    shared = Unavailable(registry)
    script = Script(step_s=0.001)
    fleet = await make_fleet({"decode-0": script}, api_keys=KEYS, registry=registry, usage=shared)
    shared.away = True
    await fleet.chat(headers=headers_of("team"))
    await asyncio.sleep(1.1)  # a report fails
    found = await page(fleet, status=503)
    assert "unavailable; routers keep theirs" in found["error"]["message"]
    shared.away = False
    assert [line["requests"] for line in await lines(fleet)] == [1]


class Reach:
    """A Redis, an empty one that can take its place, and the way of each router to them.

    No process starts under load: gRPC's threads and a fork can end in a crash of the child.
    """

    def __init__(self, redis_server: EmbeddedRedis) -> None:
        self.redis = redis_server
        self.spare = EmbeddedRedis(password=redis_server.password)
        self.relays = [Relay(redis_server.socket_path) for _ in range(2)]
        self.registries: list[Registry] = []

    async def __aenter__(self) -> Self:
        self.spare.start()
        for relay in self.relays:
            await relay.start()
            url = f"redis://:{self.redis.password}@127.0.0.1:{relay.port}/0"
            self.registries.append(Registry(url, "test"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self.registries:
            await one.close()
        for relay in self.relays:
            await relay.close()
        self.spare.stop()

    async def stopped(self, outage_s: float) -> None:
        server = self.redis if self.redis.pid else self.spare
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(outage_s)
        os.kill(server.pid, signal.SIGCONT)

    async def emptied(self, outage_s: float) -> None:
        self.redis.kill()
        await asyncio.sleep(outage_s)
        for relay in self.relays:
            relay.to = self.spare.socket_path

    async def cut(self, outage_s: float) -> None:
        """Cut one router off."""
        await self.relays[1].cut(outage_s)


async def run_outages(make_fleet, redis_server, outage_s: float) -> None:
    """Let clients call two routers while Redis stands, ends, and is beyond reach of one."""
    async with Reach(redis_server) as reach:
        await run_outages_of(make_fleet, reach, outage_s)


async def run_outages_of(make_fleet, reach: Reach, outage_s: float) -> None:
    script = Script(step_s=0.002, cached_tokens=3)
    fleets = [
        await make_fleet({"decode-0": script}, api_keys=KEYS, registry=one)
        for one in reach.registries
    ]
    clients = Clients(fleets, seed=11)
    over = asyncio.Event()

    async def calls() -> None:
        while not over.is_set():
            await clients.many(24, at_once=4)

    calling = asyncio.create_task(calls())
    for outage in (reach.stopped, reach.cut, reach.emptied, reach.cut, reach.stopped):
        await asyncio.sleep(1.2)
        await outage(outage_s)
    over.set()
    await calling
    for fleet in fleets:
        await flushed(fleet)
    assert await exported(fleets[0]) == clients.answers.sums
    assert await exported(fleets[1]) == clients.answers.sums


async def test_a_router_that_stops_without_redis_leaves_its_usage_to_the_next(
    make_fleet, redis_server, tmp_path, caplog
) -> None:
    async with Reach(redis_server) as reach:
        script = Script(step_s=0.001)
        more = {"api_keys": KEYS, "registry": reach.registries[0], "state_dir": str(tmp_path)}
        first = await make_fleet({"decode-0": script}, **more)
        for tenant in TENANTS:
            await first.chat(headers=headers_of(tenant))
        await first.router.usage.flush()
        redis_server.kill()
        await first.chat(headers=headers_of("team"))
        await first.router.usage.close()
        assert "kept usage in the state folder" in caplog.text
        reach.relays[0].to = reach.spare.socket_path
        for _ in range(2):
            second = await make_fleet({"decode-0": script}, **more)
            async with asyncio.timeout(10):
                while await requests_of(second) != {"team": 2, "free": 1}:
                    await asyncio.sleep(0.05)


async def requests_of(fleet) -> dict[str, int]:
    return {line["tenant"]: line["requests"] for line in await lines(fleet)}


async def flushed(fleet, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            with contextlib.suppress(RegistryUnavailableError):
                await fleet.router.usage.flush()
                return
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_the_export_is_the_sum_of_all_answers_after_outages_of_30_s(
    make_fleet, redis_server
) -> None:
    await run_outages(make_fleet, redis_server, outage_s=30.0)


async def test_workers_seconds_are_charged_once_with_their_cost(start) -> None:
    fleet = await start(price_per_hour=36.0)
    for _ in range(2):
        await fleet.chat(headers=headers_of("team"))
    for _ in range(100):  # workers confirm ends after answers
        line, idle = await lines(fleet, idle=True)
        if line["worker_s"] > 0.004:
            break
        await asyncio.sleep(0.01)
    assert line["input_worker_s"] == pytest.approx(0.006)  # 3 ms and 0.5 ms of each request
    assert line["output_worker_s"] == pytest.approx(0.001)
    assert line["cost"] == pytest.approx(0.007 * 0.01)
    assert line["cost_per_1000_output"] == pytest.approx(0.001 * 0.01 / 8 * 1000)
    computed = line["input_tokens"] - line["cached_tokens"]
    assert line["cost_per_1000_computed"] == pytest.approx(0.006 * 0.01 / computed * 1000)
    assert (idle["tenant"], idle["worker_s"]) == ("(idle)", pytest.approx(-0.007))
    text = (await fleet.http.get("/metrics", headers=OPS)).text
    assert "baton_charged_seconds_total{" in text and "baton_worker_price_per_hour" in text


async def test_an_orderly_stop_reports_everything(make_fleet, start, registry) -> None:
    fleet = await start()
    await fleet.chat(headers=headers_of("team"))
    fleet.server.should_exit = True
    for _ in range(500):
        (hour,) = await SharedUsage(registry).read([int(time.time()) // HOUR_S])
        if hour.rows:
            break
        await asyncio.sleep(0.01)
    (row,) = hour.rows.values()
    assert row.requests == 1 and row.output_tokens == 4


async def test_an_attempt_that_failed_is_charged_once(start) -> None:
    """The worker repeats its end while the request runs at another one."""
    fails = Script(fail=("unavailable", "no room", True))
    fleet = await start({"decode-0": fails, "decode-1": Script(step_s=0.02)})
    first = fleet.workers["decode-0"]
    calls = []
    while not first.submissions:
        calls.append(asyncio.create_task(fleet.chat(headers=headers_of("team"), max_tokens=20)))
        await asyncio.sleep(0.05)
    submission = first.submissions[0]
    for _ in range(3):
        first._end(submission)
    await asyncio.gather(*calls)
    ends = len(first.submissions) + len(calls)
    for _ in range(200):
        (line,) = await lines(fleet)
        if line["worker_s"] >= 0.0035 * ends - 1e-9:
            break
        await asyncio.sleep(0.01)
    assert line["worker_s"] == pytest.approx(0.0035 * ends)
    assert line["requests"] == len(calls)


async def test_lines_of_batches_are_counted_with_a_key_of_their_own(start, tmp_path) -> None:
    fleet = await start(state_dir=str(tmp_path))
    body = {"model": MODEL, "prompt": "four or five", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    content = "\n".join(json.dumps(line | {"custom_id": str(n)}) for n in range(3)).encode()
    headers = headers_of("team")
    sent = await fleet.http.post(
        "/v1/files",
        files={"file": ("lines.jsonl", content)},
        data={"purpose": "batch"},
        headers=headers,
    )
    batch = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions"}
    batch["completion_window"] = "24h"
    made = (await fleet.http.post("/v1/batches", json=batch, headers=headers)).json()
    while made["status"] != "completed":
        await asyncio.sleep(0.05)
        made = (await fleet.http.get(f"/v1/batches/{made['id']}", headers=headers)).json()
    await fleet.complete("one or two", headers)
    found = {one["key"]: one["requests"] for one in await lines(fleet, by="tenant,key")}
    assert found.pop("batch") == 3 and list(found.values()) == [1]
    for is_batch, count in (("true", 3), ("false", 1)):
        buckets = (await page(fleet, batch=is_batch, group_by="batch"))["data"]
        results = [result for bucket in buckets for result in bucket["results"]]
        assert [(one["num_model_requests"], one["batch"]) for one in results] == [
            (count, is_batch == "true")
        ]
