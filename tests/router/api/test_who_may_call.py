"""Every route with every method, called without a key, by tenants and by operators.

Also every route as a stranger to a tenant that has one of everything: nothing of it is shown.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import AsyncMock

import msgspec
import pytest

from baton.config.clients import ApiKeyConfig
from baton.registry.shared_adapters import AdapterEntry
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.tenants.key_record import issue, new_key
from router.adapter_table import AdapterTable
from router.frontend.operators.deletion import command
from router.served_model import ServedModel
from router.sources import LaneTables
from router.tenants.key_table import KeyTable
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-owner": ApiKeyConfig(tenant="owner", adapters="own"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
EXPIRED, REVOKED = new_key(), new_key()  # of operators
REFUSED_CALLERS = ("", "no such key", EXPIRED, REVOKED)
CALLERS = (*REFUSED_CALLERS, *KEYS, "secret")  # the last is the fleet's token
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH")

EVERYBODY = {
    *("/", "/docs", "/openapi.json", "/page/{name}", "/version"),  # these hold nothing of anybody
    *("/health", "/ping", "/health/live", "/health/ready"),
}
OPERATORS = {
    *("/load", "/metrics", "/fleet", "/fleet/targets", "/fleet/series", "/fleet/orders"),
    "/fleet/cells",
    *("/fleet/planner", "/fleet/keys", "/fleet/keys/{key_id}", "/fleet/keys/{key_id}/rotate"),
    *("/fleet/models", "/fleet/tenants/{tenant}"),
    *("/sleep", "/wake_up", "/is_sleeping", "/server_info"),
}
OWNERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}

REFUSED = (401, 403)
VIOLET = "tenant-violet"  # the tenant that strangers must not see
SECRET = "armadillo"  # in everything that it has
ADAPTER = f"{VIOLET}/{SECRET}"


def adopt_ended_keys(table: KeyTable) -> None:
    """Add an expired and a revoked operator's key."""
    rights = {"tenant": VIOLET, "role": "operator"}
    table.adopt(issue(EXPIRED, rights, created_ms=1, expires_ms=10**12))
    table.adopt(msgspec.structs.replace(issue(REVOKED, rights, created_ms=1), revoked_ms=2))


def paths_of(app) -> Iterator[str]:
    """Every path that the application serves."""
    routes = list(app.routes)
    for included in app.routes:  # FastAPI keeps what was included as one route
        routes += getattr(getattr(included, "original_router", None), "routes", [])
    yield from sorted({route.path for route in routes if hasattr(route, "path")})


def refusals(path: str) -> list[int | None]:
    """What each of the callers is refused with; None: it is let in."""
    if path in EVERYBODY:
        return [None] * len(CALLERS)
    one, owner = (
        (403, 403) if path in OPERATORS else (403, None) if path in OWNERS else (None, None)
    )
    return [*([401] * len(REFUSED_CALLERS)), one, owner, None, None]


@pytest.fixture
async def everything(make_fleet, model, artifact, registry, tmp_path, monkeypatch):
    """A router with all its parts; orders get no response."""
    monkeypatch.setattr(command, "LIMIT_S", 0.1)  # its worker is a script, and confirms nothing
    served = object.__new__(ServedModel)
    served.__dict__.update(model.__dict__)
    served.adapters = AdapterTable(artifact.config, model.names, folder=str(tmp_path))
    orders = SimpleNamespace(ask=AsyncMock(return_value=None))
    limits = StoreLimits(keep_s=60, tenant_bytes=10**6, total_bytes=10**7)
    fleet = await make_fleet(
        {"decode-0": Script(step_s=0.001)},
        served,
        api_keys=KEYS | {f"key-of-{VIOLET}": ApiKeyConfig(tenant=VIOLET)},
        registry=registry,
        responses=StoredResponses(registry, limits),
        tables=replace(LaneTables.of(registry), commands=orders),
        state_dir=str(tmp_path),
    )
    adopt_ended_keys(fleet.router.access.issued_keys)
    return fleet


async def status_of(fleet, method: str, url: str, key: str, body: dict | None) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await fleet.http.request(method, url, json=body, headers=headers)
    return answer.status_code


@pytest.mark.costly
async def test_each_route_lets_in_whom_it_should(everything):
    """A route that is new needs a key, or a line above."""
    fleet = everything
    answered = 0
    paths = list(paths_of(fleet.app))
    assert set(paths) > EVERYBODY | OPERATORS | OWNERS
    for path in paths:
        url, served = re.sub(r"\{[^}]*\}", "x", path), False
        for method in METHODS:
            body = None if method in ("GET", "DELETE") else {}
            statuses = [await status_of(fleet, method, url, key, body) for key in ("", "secret")]
            if statuses == [405, 405]:
                continue
            statuses = [await status_of(fleet, method, url, key, body) for key in CALLERS]
            found = [status if status in REFUSED else None for status in statuses]
            assert (method, path, found) == (method, path, refusals(path))
            assert 500 not in statuses
            served, answered = True, answered + 1
        assert served, path
    assert answered >= 50


class Things:
    """One of everything that a tenant can have, with the ids by the name of their parameter."""

    def __init__(self, fleet) -> None:
        self.fleet = fleet
        self.headers = {"authorization": f"Bearer key-of-{VIOLET}"}
        self.operator = {"authorization": "Bearer key-of-ops"}
        self.ids: dict[str, set[str]] = {}

    async def make(self) -> None:
        chat = await self.fleet.chat(f"the {SECRET}", self.headers, model=ADAPTER)
        many = await self.fleet.complete([f"the {SECRET}", "b"], self.headers)
        request_ids = {chat.headers["x-request-id"], many.headers["x-request-id"]}
        body = {"model": MODEL, "input": f"the {SECRET}", "max_output_tokens": 4}
        response = await self._post("/v1/responses", body)
        line = {"custom_id": SECRET, "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": MODEL, "prompt": SECRET, "max_tokens": 1}
        sent = await self.fleet.http.post(
            "/v1/files",
            files={"file": (f"{SECRET}.jsonl", json.dumps(line).encode())},
            data={"purpose": "batch"},
            headers=self.headers,
        )
        file_id = sent.json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = await self._post("/v1/batches", body | {"metadata": {"name": SECRET}})
        url = f"/v1/batches/{batch['id']}"
        for _ in range(400):
            found = (await self.fleet.http.get(url, headers=self.headers)).json()
            if found["status"] == "completed":
                break
            await asyncio.sleep(0.05)
        await self.fleet.http.put(
            f"/fleet/tenants/{VIOLET}", json={"rpm": 10**6}, headers=self.operator
        )
        self.ids = {
            "tenant": {VIOLET},
            "request_id": request_ids,
            "response_id": {response["id"]},
            "file_id": {file_id, found["output_file_id"]},
            "batch_id": {batch["id"]},
            "model_id": {ADAPTER},
            "key_id": {issue(EXPIRED, {}).id, issue(REVOKED, {}).id},
            "name": {SECRET},
        }

    async def _post(self, path: str, body: dict) -> dict:
        answer = await self.fleet.http.post(path, json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def all_there(self) -> bool:
        """Return whether the tenant can still read everything."""
        paths = [f"/fleet/requests/{name}" for name in self.ids["request_id"]]
        paths += [f"/v1/responses/{name}" for name in self.ids["response_id"]]
        paths += [f"/v1/files/{name}/content" for name in self.ids["file_id"]]
        paths += [f"/v1/batches/{name}" for name in self.ids["batch_id"]]
        paths.append(f"/v1/models/{ADAPTER}")
        limits = await self.fleet.http.get("/fleet/tenants", headers=self.operator)
        if VIOLET not in limits.text:
            return False
        answers = [await self.fleet.http.get(path, headers=self.headers) for path in paths]
        return all(answer.status_code == 200 for answer in answers)

    def urls(self, path: str) -> list[str]:
        """The path with each id of the tenant in its place."""
        names = re.findall(r"\{(\w+)[^}]*\}", path)
        urls = [path]
        for name in names:
            put = re.compile(r"\{" + name + r"[^}]*\}")
            urls = [put.sub(known, url) for url in urls for known in sorted(self.ids[name])]
        return urls

    def bodies(self) -> list[dict]:
        """Bodies that name what the tenant has."""
        message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        file_id, response_id = min(self.ids["file_id"]), min(self.ids["response_id"])
        return [
            {},
            {"model": ADAPTER, "prompt": "hi", "input": "hi", "max_tokens": 1},
            {"model": ADAPTER, **message},
            {"model": ADAPTER, "input": "hi"},
            {"model": MODEL, "input": "hi", "previous_response_id": response_id},
            {
                "input_file_id": file_id,
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            },
            {"lora_name": ADAPTER, "lora_path": "."},
            {"lora_name": ADAPTER},
        ]


def shows(url: str, answer, things: Things) -> list[str]:
    """Return the tenant's data in a response that the caller has not sent."""
    known = {VIOLET, SECRET} | {name for ids in things.ids.values() for name in ids}
    request = answer.request
    sent = url + request.content.decode("latin-1") + request.headers.get("authorization", "")
    text = answer.text + str(dict(answer.headers))
    return [name for name in known if name in text and name not in sent]


@pytest.mark.costly
async def test_no_route_shows_a_stranger_anything_of_a_tenant(everything):
    """Another tenant, no key, an expired and a revoked one: nothing leaks and nothing is lost."""
    fleet = everything
    entry = AdapterEntry(name=ADAPTER, owner=VIOLET, digest="00" * 16)
    await fleet.lane.model.adapters._synced.change(
        lambda before, _: msgspec.structs.replace(before, entries={ADAPTER: entry})
    )
    things = Things(fleet)
    await things.make()
    assert await things.all_there()
    strangers = ("key-of-one", "key-of-owner", *REFUSED_CALLERS)
    calls = 0
    for path in paths_of(fleet.app):
        for url in things.urls(path):
            for method in METHODS:
                bodies = [None] if method in ("GET", "DELETE") else things.bodies()
                for body, key in product(bodies, strangers):
                    headers = {"authorization": f"Bearer {key}"} if key else {}
                    answer = await fleet.http.request(method, url, json=body, headers=headers)
                    if answer.status_code == 405:
                        break
                    found = shows(url, answer, things)
                    assert not found, (key, method, url, body, found)
                    calls += 1
    assert calls > 500
    assert await things.all_there(), "a stranger has removed something"
    seen = (await fleet.http.get("/fleet/requests", headers=things.headers)).text
    assert all(name in seen for name in things.ids["request_id"]), "the search can find something"
