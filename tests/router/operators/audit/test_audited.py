"""Calls that change something are in the audit log, with their caller, and without secrets."""

import json
import time
from hashlib import sha256
from pathlib import Path

import pytest

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.registry.admin_commands import AdminCommands
from baton.tenants.audit.chain import verify
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.tenants.key_record import issue, new_key
from router.frontend.operators.deletion import command
from router.sources import LaneTables
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import until

__all__ = ["redis_server", "registry"]

CLI = {"authorization": "Bearer secret", "x-baton-operator": "ann@host-1"}


@pytest.fixture
async def fleet(make_fleet, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LIMIT_S", 1.2)
    return await make_fleet(
        {},
        api_keys={"key-of-team": ApiKeyConfig(tenant="team")},
        registry=registry,
        tables=LaneTables.of(registry),
        audit=AuditLog(AuditInbox(registry), tmp_path / "audit.jsonl"),
    )


def entries(folder: Path) -> list[dict]:
    lines = (folder / "audit.jsonl").read_bytes().splitlines()
    assert verify(lines).broken_line == 0
    return [json.loads(line) for line in lines]


def sent(key: str, **rights: object) -> dict:
    record = issue(key, rights)
    return {"id": record.id, "sha256": record.sha256, "rights": rights, "expires_s": None}


async def test_keys_and_tenants(fleet, tmp_path):
    first, second, third = new_key(), new_key(), new_key()
    made = [sent(first, tenant="team", role="operator")]
    answer = await fleet.http.post("/fleet/keys", json={"keys": made}, headers=CLI)
    assert answer.status_code == 200, answer.text
    first_id = made[0]["id"]
    by_key = {"authorization": f"Bearer {first}"}
    successor = sent(second, tenant="team", role="operator")
    body = {"id": successor["id"], "sha256": successor["sha256"], "overlap_s": 60}
    await fleet.http.post(f"/fleet/keys/{first_id}/rotate", json=body, headers=by_key)
    await fleet.http.delete(f"/fleet/keys/{first_id}", headers=CLI)
    imported = {**sent(third, tenant="team"), "by_hash": True}
    await fleet.http.post("/fleet/keys", json={"keys": [imported]}, headers=CLI)
    for limits in ({"rpm": 10}, {"tpm": 5}):
        await fleet.http.put("/fleet/tenants/team", json=limits, headers=CLI)
    receipt = (await fleet.http.delete("/fleet/tenants/team", headers=CLI, timeout=20)).json()
    found = entries(tmp_path)
    shown = [(one["verb"], one["what"], one["who"]) for one in found]
    ann = "operator ann@host-1"
    assert shown == [
        ("keys create", first_id, ann),
        ("keys rotate", first_id, f"key {first_id}"),
        ("keys revoke", first_id, ann),
        ("keys import", imported["id"], ann),
        ("tenants set", "team", ann),
        ("tenants set", "team", ann),
        ("tenants delete", "team", ann),
    ]
    assert {one["from"] for one in found} == {"127.0.0.1"}
    assert found[0]["after"] == {"tenant": "team", "role": "operator", "expires_s": None}
    assert (found[5]["before"], found[5]["after"]) == ({"rpm": 10}, {"rpm": 10, "tpm": 5})
    assert found[6]["after"] == receipt
    text = (tmp_path / "audit.jsonl").read_text()
    for key in (first, second, third, "secret", "key-of-team"):
        assert key not in text and sha256(key.encode()).hexdigest() not in text


async def test_refused_changes_are_no_changes(fleet, tmp_path):
    team = {"authorization": "Bearer key-of-team"}
    for headers, status in ((team, 403), (CLI, 400)):
        answer = await fleet.http.put("/fleet/tenants/team", json={"rpm": -1}, headers=headers)
        assert answer.status_code == status
    assert not (tmp_path / "audit.jsonl").exists()


async def test_refused_logins_are_sampled(fleet, tmp_path):
    for number in range(14):
        wrong = {"authorization": f"Bearer wrong-key-{number}"}
        assert (await fleet.http.get("/v1/models?prompt=mark", headers=wrong)).status_code == 401
    await until(lambda: (tmp_path / "audit.jsonl").exists(), 3.0)
    await until(lambda: len(entries(tmp_path)) == 10, 3.0)
    found = entries(tmp_path)
    assert {(one["verb"], one["what"], one["who"], one["from"]) for one in found} == {
        ("login refused", "GET /v1/models", "unknown", "127.0.0.1")
    }
    assert "wrong-key" not in json.dumps(found) and "mark" not in json.dumps(found)
    logins = fleet.router.refused_logins
    (rest,) = logins.take(time.monotonic_ns() + 60_000_000_000)
    assert rest.after == {"left_out": 4}


@pytest.mark.parametrize(
    ("proxies", "forwarded", "source"),
    [
        ((), "203.0.113.66", "127.0.0.1"),  # anyone can write this
        (("10.0.0.0/8",), "203.0.113.66", "127.0.0.1"),
        (("127.0.0.1",), "203.0.113.66", "203.0.113.66"),
        (("127.0.0.1",), "<b>203.0.113.66</b>", "unknown"),
        (("127.0.0.0/8", "10.0.0.0/8"), "192.0.2.1, 203.0.113.66, 10.1.1.1", "203.0.113.66"),
    ],
)
async def test_only_proxies_name_the_source(
    make_fleet, registry, tmp_path, proxies, forwarded, source
):
    fleet = await make_fleet(
        {},
        api_keys={"key-of-team": ApiKeyConfig(tenant="team")},
        registry=registry,
        audit=AuditLog(AuditInbox(registry), tmp_path / "audit.jsonl"),
        clients=ClientLimitsConfig(proxies=proxies),
    )
    wrong = {"authorization": "Bearer wrong", "x-forwarded-for": forwarded}
    assert (await fleet.http.get("/v1/models", headers=wrong)).status_code == 401
    await until(lambda: (tmp_path / "audit.jsonl").exists(), 3.0)
    await until(lambda: entries(tmp_path), 3.0)
    assert entries(tmp_path)[0]["from"] == source


async def test_orders_name_their_caller(fleet, registry):
    body = {"verb": "scale", "arguments": {"prefill": 2}, "timeout_s": 0.1}
    answer = await fleet.http.post("/fleet/orders", json=body, headers=CLI)
    assert answer.status_code == 503, "there is no controller"
    order = await AdminCommands(registry).take()
    assert order is not None
    assert (order.who, order.source) == ("operator ann@host-1", "127.0.0.1")


@pytest.mark.parametrize("name", ["a b", "x" * 200, "<script>", ""])
async def test_names_of_operators_are_no_way_to_write_anything(fleet, tmp_path, name):
    headers = {**CLI, "x-baton-operator": name}
    await fleet.http.put("/fleet/tenants/team", json={"rpm": 3}, headers=headers)
    assert [one["who"] for one in entries(tmp_path)] == ["fleet token"]


async def test_others_cannot_name_an_operator(fleet, tmp_path):
    key = new_key()
    made = {"keys": [sent(key, tenant="team", role="operator")]}
    await fleet.http.post("/fleet/keys", json=made, headers=CLI)
    headers = {"authorization": f"Bearer {key}", "x-baton-operator": "ann@host-1"}
    await fleet.http.put("/fleet/tenants/team", json={"rpm": 3}, headers=headers)
    assert entries(tmp_path)[-1]["who"] == f"key {made['keys'][0]['id']}"
