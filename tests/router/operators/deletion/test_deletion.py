"""Deletion of a tenant at routers with a real Redis: what is in the receipt, and cache salts."""

import asyncio
import os
import signal
import time

import httpx
import pytest

from baton.config.clients import ApiKeyConfig, BatchConfig
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.tenants.erasures import Erasures
from baton.tenants.tenants_file import TenantsFile
from baton.types.block_hashes import tag_of
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from router.frontend.operators.deletion import command, local
from router.tenants.policies import TenantPolicies
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

OPS = {"authorization": "Bearer secret"}
TEAM = {"authorization": "Bearer key-of-team"}
KEYS = {"key-of-team": ApiKeyConfig(tenant="team"), "key-of-other": ApiKeyConfig(tenant="other")}
LIMITS = StoreLimits(keep_s=60, tenant_bytes=1 << 20, total_bytes=1 << 20)


@pytest.fixture
def start(make_fleet, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LIMIT_S", 3.0)

    async def fleet_of(folder: str = "state", **more):
        (tmp_path / folder).mkdir(exist_ok=True)
        settings = {"api_keys": KEYS, "state_dir": str(tmp_path / folder), **more}
        return await make_fleet(
            {"decode-0": settings.pop("script", Script(step_s=0.001))},
            responses=StoredResponses(registry, LIMITS),
            registry=registry,
            **settings,
        )

    return fleet_of


async def confirm(registry, worker_id: str, counts: dict[str, int]) -> None:
    """The report of a worker, as soon as there is a deletion."""
    erasures = Erasures(registry)
    while not (found := await erasures.forgotten()).tags:
        await asyncio.sleep(0.05)
    await erasures.report(next(iter(found.tags.values())), worker_id, counts)


async def delete(fleet, tenant: str = "team") -> dict:
    answer = await fleet.http.delete(f"/fleet/tenants/{tenant}", headers=OPS, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def respond(fleet, key: str = "key-of-team") -> httpx.Response:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    return await fleet.http.post("/v1/responses", json=body, headers=headers)


def owner(fleet, tenant: str = "team", *, shared: bool = False) -> str:
    return fleet.router.policies.owner_of(tenant, shared=shared)


async def test_responses_and_limits_go_and_the_receipt_names_each_part(start, registry) -> None:
    fleet = await start()
    made = [(await respond(fleet)).json()["id"] for _ in range(3)]
    others = (await respond(fleet, "key-of-other")).json()["id"]
    await fleet.http.put("/fleet/tenants/team", json={"rpm": 100}, headers=OPS)
    await until(lambda: fleet.router.quotas.quotas.has_limits("team"), 1.0)
    await respond(fleet)
    bank = ("EXISTS", registry.key("quotas", "team"))
    assert await registry.send(bank) == [1]
    worker = asyncio.create_task(confirm(registry, "decode-0", {"pool": 3, "disk": 2}))
    receipt = await delete(fleet)
    await worker
    router = f"router {fleet.lane.gateway.router_id}"
    assert receipt["deleted"] == {
        "responses": 4,
        "files": 0,
        "batches": 0,
        "log_lines": 0,
        "kv_blocks": {"pool": 3, "memory": 0, "disk": 2},
    }
    assert receipt["confirmed_by"] == ["decode-0", router]
    assert (receipt["not_deleted"], receipt["limits"], receipt["valid_keys"]) == ([], True, 1)
    for name in made:
        assert (await fleet.http.get(f"/v1/responses/{name}", headers=TEAM)).status_code == 404
    of_other = {"authorization": "Bearer key-of-other"}
    assert (await fleet.http.get(f"/v1/responses/{others}", headers=of_other)).status_code == 200
    assert not fleet.router.quotas.quotas.has_limits("team")
    assert await registry.send(bank) == [0]


async def test_what_does_not_confirm_or_cannot_is_in_the_receipt(start, registry) -> None:
    fleet = await start()
    worker = asyncio.create_task(confirm(registry, "decode-0", {"pool": 1, "disk": -1}))
    receipt = await delete(fleet)
    await worker
    assert receipt["not_deleted"] == ["decode-0: KV in its disk tier, see its log"]
    assert receipt["deleted"]["kv_blocks"]["disk"] == 0
    receipt = await delete(fleet, "other")
    assert receipt["not_deleted"] == ["decode-0: has not confirmed; it erases its KV later"]


async def test_the_cache_gets_a_new_salt_at_all_routers_and_the_old_tag_is_told(
    start, registry
) -> None:
    one, two = await start(), await start("other")
    assert owner(one) == owner(two) == "team"
    await delete(one)
    await until(lambda: owner(two) != "team", 1.0)
    assert owner(one) == owner(two) and owner(one).startswith("team:")
    assert owner(one, "other") == "other"
    assert set((await Erasures(registry).forgotten()).tags) == {tag_of("team").hex()}
    before = owner(one)
    await delete(two)
    await until(lambda: owner(one) != before, 1.0)
    tags = set((await Erasures(registry).forgotten()).tags)
    assert tags == {tag_of("team").hex(), tag_of(before).hex()}


async def test_a_shared_cache_is_forgotten_as_a_whole(start, registry) -> None:
    fleet = await start(share_cache=True)
    receipt = await delete(fleet)
    assert receipt["shared_cache"]
    assert owner(fleet, shared=True) == owner(fleet, "other", shared=True) != ""
    assert set((await Erasures(registry).forgotten()).tags) == {tag_of("").hex()}


@pytest.mark.slow
async def test_no_old_salt_comes_back_without_redis_or_with_an_empty_one(
    start, registry, redis_server
) -> None:
    one = await start()
    await delete(one)
    salted = owner(one)
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        again = await start()  # has the copy on disk
        stranger = await start("elsewhere")  # has none, so it shares no cache
        assert owner(again) == salted
        assert owner(stranger) not in ("team", salted) and owner(stranger, "other") != "other"
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    await until(lambda: owner(stranger) == salted, 3.0)
    await registry.send(("FLUSHALL",))
    await until(lambda: one.router.policies.table.version > 0, 1.0)
    await asyncio.sleep(1.2)
    assert owner(await start("third")) == salted, "routers have written the table again"


async def test_policies_in_a_file_keep_no_old_salt_and_are_in_the_receipt(start, tmp_path) -> None:
    """Policies come from the file, deletions from Redis."""
    path = tmp_path / "tenants.yaml"
    path.write_text("team: {rpm: 600}\n")
    fleet = await start(policies=TenantPolicies(TenantsFile.beside(str(tmp_path / "keys.yaml"))))
    before = owner(fleet)
    receipt = await delete(fleet)
    assert f"limits: they are in {path}" in receipt["not_deleted"]
    assert owner(fleet) != before
    await asyncio.sleep(1.2)  # routers compare with Redis twice a second
    assert owner(fleet) != before
    assert fleet.router.policies.of("team").rpm == 600


async def test_a_response_that_was_running_is_not_stored(start) -> None:
    fleet = await start(script=Script(step_s=0.5))
    running = asyncio.create_task(respond(fleet))
    await asyncio.sleep(0.3)
    receipt = await delete(fleet)
    answer = (await running).json()
    assert answer["store"] is False
    assert answer["not_stored"].startswith("the tenant's data was deleted")
    assert receipt["deleted"]["responses"] == 0
    assert (await respond(fleet)).json()["store"] is True


async def test_without_redis_nothing_is_deleted(start, registry, redis_server) -> None:
    fleet = await start()
    made = (await respond(fleet)).json()["id"]
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        answer = await fleet.http.delete("/fleet/tenants/team", headers=OPS, timeout=30)
        assert answer.status_code == 503
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert owner(fleet) == "team"
    assert (await fleet.http.get(f"/v1/responses/{made}", headers=TEAM)).status_code == 200


async def test_a_batch_whose_lines_do_not_end_is_in_the_receipt(
    start, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(local, "_CANCEL_LIMIT_S", 0.2)
    store = BatchStore(tmp_path / "state" / "batch", BatchConfig())
    now_s = int(time.time())
    ended, running = (
        BatchRecord(
            id=f"batch_{number:032x}",
            tenant="team",
            endpoint="/v1/chat/completions",
            input_file_id="file-1",
            completion_window="24h",
            created_s=now_s,
            expires_s=now_s + 3600,
            state=state,
        )
        for number, state in enumerate(("completed", "in_progress"))
    )
    store.save(ended)
    store.save(running)
    with store.lock() as held:  # as a router that does not look at the cancel
        assert held
        receipt = await delete(await start())
    assert receipt["deleted"]["batches"] == 1
    (problem,) = [text for text in receipt["not_deleted"] if "decode-0" not in text]
    assert running.id in problem
    assert not store.has(running)
