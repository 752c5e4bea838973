"""What one router of a group does not know, another one does."""

import contextlib
import json
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from baton.registry.redis_store import Registry
from baton.tenants.key_record import issue, new_key
from router.frontend.group.any_router import AnyRouter
from router.frontend.group.siblings import OWN_ANSWER
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script


class Other:
    """A sibling, without the socket between."""

    def __init__(self, app) -> None:
        self._client = client_of(app)

    async def alive(self):
        return [1]

    async def ask(self, index, method, path, headers, body=b""):
        passed = {name: headers[name] for name in ("authorization",) if name in headers}
        sent = {**passed, OWN_ANSWER: "1"}
        return await self._client.request(method, path, headers=sent, content=body)

    async def ask_all(self, path, headers):
        return {1: await self.ask(1, "GET", path, headers)}


def client_of(app) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


@pytest.fixture
async def two(make_fleet):
    """The second of two routers without Redis, and the group's application of the first."""
    registry = Registry("redis://127.0.0.1:1/0", "test")
    script = Script(step_s=0.02)
    fleets = [await make_fleet({"decode-0": script}, registry=registry) for _ in range(2)]
    past = SimpleNamespace(keep=lambda page: None, missing=lambda answered: [])
    app = AnyRouter(fleets[0].server.config.app, Other(fleets[1].server.config.app), past, {})
    async with client_of(app) as client:
        yield fleets[1], client
    await registry.close()


@contextlib.asynccontextmanager
async def running(fleet):
    """The id of a response that runs at a router, and the lines of its stream."""
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 2000, "stream": True}
    async with fleet.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                yield json.loads(line[6:])["response"]["id"], lines
                return


async def test_a_response_that_runs_elsewhere_is_cancelled_without_redis(two):
    """The first router answered 503, as it could not read what is kept, and asked nobody."""
    fleet, client = two
    async with running(fleet) as (name, lines):
        found = await client.get(f"/v1/responses/{name}")
        assert (found.status_code, found.json()["status"]) == (200, "in_progress")
        cancelled = await client.post(f"/v1/responses/{name}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert "response.failed" in "".join([line async for line in lines])
    assert (await client.get("/v1/responses/resp_" + "0" * 32)).status_code == 503


async def test_a_request_that_runs_elsewhere_is_aborted(two):
    fleet, client = two
    async with running(fleet) as (name, lines):
        body = {"request_ids": [name]}
        assert (await client.post("/inference/v1/abort_requests", json=body)).status_code == 200
        assert "response.incomplete" in "".join([line async for line in lines])


async def test_a_question_reaches_the_sibling_as_it_was_asked(two):
    fleet, client = two
    async with running(fleet) as (name, _):
        refused = await client.get(f"/v1/responses/{name}?stream=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


async def test_a_fault_has_the_format_of_all_errors(two, monkeypatch):
    """The server answered in plain text, as the application raises its faults again."""
    _, client = two

    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr("router.tenants.access.AccessControl._key_of", fail)
    monkeypatch.setattr("router.tenants.access.AccessControl.of", fail)
    for method, path in (
        ("GET", "/fleet/requests/x"),
        ("POST", "/inference/v1/abort_requests"),
        ("GET", "/fleet/requests"),
    ):
        failed = await client.request(method, path)
        assert failed.status_code == 500
        assert failed.json()["error"]["message"] == "the router failed; see its log", path


async def test_a_limit_may_be_spelled_as_urls_spell(two):
    fleet, client = two
    for _ in range(3):
        await fleet.chat(max_tokens=1)
    for query in ("limit=%32", "limit=2", "l%69mit=2&order=newest"):
        listed = await client.get(f"/fleet/requests?{query}")
        assert (listed.status_code, len(listed.json()["requests"])) == (200, 2)


async def test_a_revocation_reaches_the_sibling_without_redis(make_fleet, tmp_path):
    registry = Registry("redis://127.0.0.1:1/0", "test")
    secret = new_key()
    record = issue(secret, {"tenant": "team"})
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode([record]))  # known from before
    settings = {"api_keys": {}, "registry": registry, "state_dir": str(tmp_path)}
    fleets = [await make_fleet({"decode-0": None}, **settings) for _ in range(2)]
    past = SimpleNamespace(keep=lambda page: None, missing=lambda answered: [])
    apps = [fleet.server.config.app for fleet in fleets]
    headers = {"authorization": "Bearer secret"}
    async with client_of(AnyRouter(apps[0], Other(apps[1]), past, {})) as client:
        answer = await client.delete(f"/fleet/keys/{record.id}", headers=headers)
    assert (answer.status_code, answer.json()["everywhere"]) == (200, False)
    for fleet in fleets:
        seen = await fleet.http.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        assert seen.status_code == 401, "each of them refuses it"
    await registry.close()
