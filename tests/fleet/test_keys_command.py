"""`baton keys`: issue, list, rotate, revoke and import keys of a running router. Real Redis."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.tenants.key_record import KEY
from fleet.cli import keys as command
from fleet.cli.main import app
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import artifact, make_fleet, model

__all__ = ["artifact", "make_fleet", "model", "redis_server", "registry"]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_EVERYWHERE_S", 0.0)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
async def fleet(make_fleet, registry):
    return await make_fleet({"decode-0": None}, api_keys={}, registry=registry)


async def run(fleet, *arguments: str, code: int = 0):
    """A command with the operator's rights, which the fleet token has."""
    given = ["keys", *arguments, "--url", fleet.url, "--api-key", "secret"]
    result = await asyncio.to_thread(CliRunner().invoke, app, given)
    assert result.exit_code == code, result.output
    return result


async def status(fleet, key: str, path: str = "/v1/models") -> int:
    answer = await fleet.http.get(path, headers={"authorization": f"Bearer {key}"})
    return answer.status_code


async def test_a_team_gets_a_key_and_loses_it_again(fleet) -> None:
    made = await run(fleet, "create", "team-a", "--expires", "90d")
    key = made.stdout.strip()
    key_id = KEY.fullmatch(key)[1]
    assert f"id {key_id}, tenant team-a, role tenant, expires" in made.stderr
    assert "not shown again" in made.stderr
    assert await status(fleet, key) == 200
    shown = (await run(fleet, "ls")).output
    assert key_id in shown and "team-a" in shown and "valid" in shown and key not in shown

    rotated = await run(fleet, "rotate", key_id, "--overlap", "1h")
    new = rotated.stdout.strip()
    assert KEY.fullmatch(new) and f"{key_id} expires" in rotated.stderr
    assert [await status(fleet, one) for one in (key, new)] == [200, 200]
    assert "replaced by" in (await run(fleet, "rotate", key_id, code=1)).output

    revoked = await run(fleet, "revoke", key_id)
    assert revoked.output == f"{key_id}: revoked\n"
    assert [await status(fleet, one) for one in (key, new)] == [401, 200]


async def test_json_of_every_command(fleet, tmp_path) -> None:
    options = (
        "--role",
        "operator",
        "--min-priority",
        "-3",
        "--slo-ttft-s",
        "2",
        "--slo-itl-s",
        "1",
    )
    made = json.loads((await run(fleet, "create", "ops", *options, "--json")).stdout)
    assert await status(fleet, made["key"], "/fleet") == 200
    wanted = {"tenant": "ops", "role": "operator", "min_priority": -3, "expires": None}
    assert made.items() >= wanted.items()
    assert made["slo"] == {"ttft_s": 2.0, "itl_s": 1.0}
    rotated = json.loads((await run(fleet, "rotate", made["id"], "--json")).stdout)
    assert rotated.items() >= wanted.items() and rotated["key"] != made["key"]
    revoked = json.loads((await run(fleet, "revoke", made["id"], "--json")).stdout)
    assert (revoked["id"], revoked["state"]) == (made["id"], "revoked")
    listed = json.loads((await run(fleet, "ls", "--json")).stdout)["keys"]
    assert {key["id"]: key["state"] for key in listed} == {
        made["id"]: "revoked",
        rotated["id"]: "valid",
    }
    file = tmp_path / "keys.yaml"
    file.write_text("key-of-a-team: a\nkey-of-ops-team: {role: operator, tenant: ops}\n")
    for counts in ({"added": 2, "known": 0}, {"added": 0, "known": 2}):
        assert json.loads((await run(fleet, "import", str(file), "--json")).stdout) == counts
    assert await status(fleet, "key-of-a-team") == 200
    assert await status(fleet, "key-of-ops-team", "/fleet") == 200


async def test_what_is_wrong_is_named(fleet) -> None:
    for arguments, said in (
        (("create", "a b"), "tenant = 'a b'"),
        (("create", "a", "--expires", "soon"), "--expires soon: use a number and a unit"),
        (("create", "a", "--slo-ttft-s", "1"), "slo.itl_s"),
        (("create", "a", "--log-text"), "log_text needs"),
        (("rotate", "aaaaaaaaaaaa"), "no API key has the id aaaaaaaaaaaa"),
        (("revoke", "aaaaaaaaaaaa"), "no API key has the id aaaaaaaaaaaa"),
        (("import", "/nowhere"), "cannot be read from /nowhere"),
    ):
        result = await run(fleet, *arguments, code=1)
        assert said in result.output
        assert len(fleet.router.access.issued_keys) == 0


async def test_a_whole_key_is_not_sent_as_an_id(fleet) -> None:
    key = (await run(fleet, "create", "a")).stdout.strip()
    for verb in ("revoke", "rotate"):
        result = await run(fleet, verb, key, code=1)
        assert "not the key" in result.output and key not in result.output
    assert await status(fleet, key) == 200


async def test_without_redis_a_key_ends_here_other_changes_fail_and_the_list_is_called_old(
    fleet, redis_server, monkeypatch
) -> None:
    monkeypatch.setattr(command, "_STALE_S", 0.0)
    key = (await run(fleet, "create", "a")).stdout.strip()
    lost = (await run(fleet, "create", "b")).stdout.strip()
    redis_server.kill()
    revoked = await run(fleet, "revoke", lost[3:15])
    assert "Redis is unavailable: revoked at this router and the others of its" in revoked.stderr
    assert revoked.stdout == f"{lost[3:15]}: revoked\n"
    assert await status(fleet, lost) == 401
    result = await run(fleet, "rotate", key[3:15], code=1)
    assert "Redis is unavailable, so nothing has changed and routers keep" in result.output
    listed = await run(fleet, "ls")
    assert "Redis is unavailable: state of" in listed.stderr and key[3:15] in listed.stdout
    assert await status(fleet, key) == 200


async def test_a_fleet_that_checks_no_keys_issues_none(make_fleet, registry) -> None:
    fleet = await make_fleet({"decode-0": None}, registry=registry)
    result = await run(fleet, "create", "a", code=1)
    assert "this fleet checks no API keys" in result.output
    assert "bt-" not in result.output


async def test_tenants_may_not_manage_keys(fleet) -> None:
    key = (await run(fleet, "create", "a")).stdout.strip()
    given = ["keys", "create", "b", "--url", fleet.url, "--api-key", key]
    result = await asyncio.to_thread(CliRunner().invoke, app, given)
    assert result.exit_code == 1 and "role `operator` is required" in result.output
