"""Retention of one tenant: for how long its data is kept, and whether its texts are logged."""

import asyncio
import logging
from io import BytesIO
from pathlib import Path

import pytest

from baton.config.clients import ApiKeyConfig, BatchConfig
from baton.config.logs import LogsConfig
from baton.registry.stored_responses import StoredResponses, StoreLimits
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

OPS = {"authorization": "Bearer secret"}
KEYS = {
    f"key-of-{name}": ApiKeyConfig(tenant=name, log_text=name != "quiet")
    for name in ("team", "other", "quiet")
}
LIMITS = StoreLimits(keep_s=60, tenant_bytes=1 << 20, total_bytes=1 << 20)


@pytest.fixture
async def fleet(make_fleet, registry, tmp_path):
    return await make_fleet(
        {"decode-0": Script(step_s=0)},
        api_keys=KEYS,
        state_dir=str(tmp_path),
        logs=LogsConfig(format="json", requests=True),
        responses=StoredResponses(registry, LIMITS),
        registry=registry,
    )


def key(name: str = "team") -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


async def put(fleet, **policy) -> None:
    answer = await fleet.http.put("/fleet/tenants/team", json=policy, headers=OPS)
    assert answer.status_code == 200, answer.text


async def respond(fleet, name: str = "team", **more) -> dict:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4, **more}
    answer = await fleet.http.post("/v1/responses", json=body, headers=key(name))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def status(fleet, response: dict, name: str = "team") -> int:
    path = f"/v1/responses/{response['id']}"
    return (await fleet.http.get(path, headers=key(name))).status_code


async def upload(fleet, name: str = "team"):
    files = {"file": ("a.jsonl", b"{}")}
    data = {"purpose": "batch"}
    return await fleet.http.post("/v1/files", files=files, data=data, headers=key(name))


async def test_responses_are_kept_for_the_time_of_the_tenant_and_no_longer(fleet, registry):
    early = await respond(fleet)
    others = await respond(fleet, "other")
    await put(fleet, keep_s=2)
    late = await respond(fleet)
    follow = await respond(fleet, previous_response_id=late["id"])
    assert [await status(fleet, one) for one in (late, follow)] == [200, 200]
    ttl_ms = [
        (await registry.send(("PTTL", registry.key("responses", f"team {one['id']}"))))[0]
        for one in (early, late)
    ]
    assert all(0 < ttl <= 2000 for ttl in ttl_ms), "what was there before, too"
    await asyncio.sleep(2.2)
    assert [await status(fleet, one) for one in (early, late, follow)] == [404, 404, 404]
    assert await status(fleet, others, "other") == 200
    await put(fleet, keep_s=None)
    assert await status(fleet, await respond(fleet)) == 200


async def test_nothing_is_stored_for_a_tenant_that_keeps_nothing(fleet):
    early = await respond(fleet)
    made = (await upload(fleet)).json()["id"]
    await put(fleet, keep_s=0)
    assert await status(fleet, early) == 404
    answer = await respond(fleet)
    assert answer["store"] is False and answer["output"]
    assert answer["not_stored"] == "the policy of this tenant stores nothing (keep_s: 0)"
    assert await status(fleet, answer) == 404
    body = {"input_file_id": made, "endpoint": "/v1/completions"}
    refused = [
        await upload(fleet),
        await fleet.http.post("/v1/batches", json=body, headers=key()),
    ]
    assert [one.status_code for one in refused] == [403, 403]
    assert {one.json()["error"]["code"] for one in refused} == {"not_kept"}
    assert (await upload(fleet, "other")).status_code == 200
    assert (await respond(fleet, "other"))["store"] is True


async def test_an_upload_expires_with_the_tenants_time(fleet):
    await put(fleet, keep_s=100)
    made = (await upload(fleet)).json()
    assert made["expires_at"] - made["created_at"] == 100
    others = (await upload(fleet, "other")).json()
    assert others["expires_at"] - others["created_at"] > 100


def test_files_and_ended_batches_are_swept_by_the_tenants_time(tmp_path: Path):
    times = {"team": 100}
    store = BatchStore(tmp_path, BatchConfig(), times.get)
    old = store.add_file("team", BytesIO(b"x"), "a", "batch", 1000, 10**9)
    others = store.add_file("other", BytesIO(b"x"), "a", "batch", 1000, 10**9)
    for name, ended_s in (("a", 1000), ("b", 1060)):
        store.save(
            BatchRecord(
                id=f"batch_{name * 32}",
                tenant="team",
                endpoint="/v1/completions",
                input_file_id=old.id,
                completion_window="24h",
                created_s=1000,
                expires_s=9000,
                state="completed",
                times_s={"completed": ended_s},
            )
        )
    store.sweep(1101)
    assert store.files("team") == [] and store.files("other") == [others]
    assert [batch.id[-1] for batch in store.batches("team")] == ["b"]
    times["other"] = 50  # it was uploaded before its tenant had a limit
    store.sweep(1101)
    assert store.files("other") == []


async def test_the_stricter_of_key_and_policy_decides_on_logged_texts(fleet, caplog):
    caplog.set_level(logging.INFO, logger="baton.requests")

    async def logs_text(name: str = "team") -> bool:
        caplog.clear()
        await respond(fleet, name)

        def lines() -> list:
            return [vars(r) for r in caplog.records if r.name == "baton.requests"]

        await until(lines)
        (line,) = lines()
        return "prompt" in line

    assert await logs_text()
    await put(fleet, log_text=False)
    assert not await logs_text()
    assert await logs_text("other")
    await put(fleet, log_text=True)
    assert await logs_text()
    body = {"log_text": True}
    await fleet.http.put("/fleet/tenants/quiet", json=body, headers=OPS)
    assert not await logs_text("quiet"), "no key of it asks for that"


async def test_a_request_that_runs_while_its_tenant_is_deleted_is_not_logged_with_texts(
    fleet, caplog
):
    caplog.set_level(logging.INFO, logger="baton.requests")
    policies = fleet.router.policies
    caplog.clear()
    policies.expect()  # the owner of the cache changes while the request runs
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body, headers=key()) as answer:
        policies.expect()
        await answer.aread()
    (line,) = [vars(r) for r in caplog.records if r.name == "baton.requests"]
    assert "prompt" not in line
