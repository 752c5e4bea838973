"""``POST /fleet/orders``: who may give orders through a router, and what comes back. Real Redis."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from baton.config.clients import ApiKeyConfig
from baton.registry.admin_commands import AdminCommand, AdminCommands, CommandReply
from baton.registry.redis_store import Registry
from baton.telemetry.metrics import Metrics
from baton.wire.fleet_token import FleetToken
from router.frontend import errors
from router.frontend.operators import admin_commands as orders
from router.settings import ProcessSettings
from router.tenants.access import AccessControl
from router.tenants.policies import TenantPolicies
from tests.registry.conftest import redis_server, registry

__all__ = ["redis_server", "registry"]

TOKEN = "the-fleets-own-token"
KEYS = {
    "key-of-a-tenant": ApiKeyConfig(tenant="one"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
DRAIN = {"verb": "drain", "workers": ["decode-0"]}


def client(registry: Registry, keys: dict[str, ApiKeyConfig] | None) -> httpx.AsyncClient:
    access = AccessControl(keys, FleetToken(TOKEN), TenantPolicies())
    metrics = Metrics("router", model="m")
    lanes = [SimpleNamespace(is_loaded=False)]
    parts = SimpleNamespace(settings=ProcessSettings(), access=access, metrics=metrics, lanes=lanes)
    app = FastAPI()
    errors.install(app, {})
    app.include_router(orders.routes(parts, {"m": AdminCommands(registry)}))
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def controller(registry: Registry) -> AsyncIterator[list[AdminCommand]]:
    """Answers each order, and keeps it."""
    taken: list[AdminCommand] = []

    async def serve() -> None:
        desk = AdminCommands(registry)
        while True:
            order = await desk.take()
            if order is None:
                await asyncio.sleep(0.01)
                continue
            taken.append(order)
            problem = "no such worker" if "decode-9" in order.worker_ids else ""
            await desk.answer(order, CommandReply(problem, data=["x"]))

    task = asyncio.create_task(serve())
    yield taken
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("keys", [KEYS, None])
async def test_orders_need_an_operators_key_even_where_requests_need_none(
    registry: Registry, controller: list[AdminCommand], keys
) -> None:
    async with client(registry, keys) as http:
        for headers in ({}, bearer("wrong"), bearer("key-of-a-tenant")):
            refused = await http.post("/fleet/orders", json=DRAIN, headers=headers)
            assert refused.status_code in (401, 403)
            assert refused.json()["error"]["code"]
        assert controller == []
        for key in ("key-of-ops", TOKEN) if keys else (TOKEN,):
            done = await http.post("/fleet/orders", json=DRAIN, headers=bearer(key))
            assert (done.status_code, done.json()) == (200, {"data": ["x"]})
    assert [(order.verb, order.worker_ids) for order in controller] == [
        ("drain", ("decode-0",))
    ] * len(controller) and controller


async def test_what_the_controller_says_no_to_is_the_clients_fault(registry, controller) -> None:
    async with client(registry, KEYS) as http:
        headers = bearer("key-of-ops")
        no = await http.post(
            "/fleet/orders", json={**DRAIN, "workers": ["decode-9"]}, headers=headers
        )
        assert no.status_code == 400 and "no such worker" in no.json()["error"]["message"]
        for body in (b"[]", b"{", b'{"verb": "stop"}', b'{"verb": "drain", "x": 1}', b"\xff"):
            answer = await http.post("/fleet/orders", content=body, headers=headers)
            assert answer.status_code == 400, body
    assert [order.worker_ids for order in controller] == [("decode-9",)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": ["decode-0", 5]}, "workers[1]: must be a valid string"),
        ({"arguments": {"decode": 2**64}}, f"arguments.decode: must be less than {2**63}"),
        ({"arguments": {"lines": []}}, "arguments.lines: must be a valid"),
        ({"verb": "Drain"}, "verb: must match pattern"),
    ],
)
async def test_a_wrong_value_is_named_and_not_shown(registry, controller, fields, message) -> None:
    async with client(registry, KEYS) as http:
        answer = await http.post(
            "/fleet/orders", json={**DRAIN, **fields}, headers=bearer("key-of-ops")
        )
    assert (answer.status_code, controller) == (400, [])
    error = answer.json()["error"]
    assert error["message"].startswith(message) and "got" not in error["message"]
    assert error["param"] == message.partition(":")[0]


async def test_without_a_controller_or_redis_it_is_said(registry, redis_server) -> None:
    async with client(registry, KEYS) as http:
        order = {**DRAIN, "timeout_s": 0.2}
        silent = await http.post("/fleet/orders", json=order, headers=bearer("key-of-ops"))
        assert silent.status_code == 503
        assert "controller did not answer" in silent.json()["error"]["message"]
        redis_server.kill()
        away = await http.post("/fleet/orders", json=order, headers=bearer("key-of-ops"))
        assert away.status_code == 503 and "Redis" in away.json()["error"]["message"]


async def test_vllms_calls_for_sleep_need_an_operators_key_and_a_level_that_frees(
    registry: Registry, controller: list[AdminCommand]
) -> None:
    async with client(registry, KEYS) as http:
        for key in ("key-of-a-tenant", "wrong"):
            for path in ("/sleep", "/wake_up"):
                assert (await http.post(path, headers=bearer(key))).status_code in (401, 403)
            answer = await http.get("/is_sleeping", headers=bearer(key))
            assert answer.status_code in (401, 403)
        assert controller == []
        ops = bearer("key-of-ops")
        for query in ("level=9", "level=0", "mode=keep"):
            assert (await http.post(f"/sleep?{query}", headers=ops)).status_code == 400
    assert controller == []
