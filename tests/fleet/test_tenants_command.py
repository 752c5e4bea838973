"""`baton tenants`: list, set and delete limits at a running router. Real Redis."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli import tenants as command
from fleet.cli.main import app
from router.frontend.operators.deletion import command as deletion
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import artifact, make_fleet, model

__all__ = ["artifact", "make_fleet", "model", "redis_server", "registry"]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_EVERYWHERE_S", 0.0)
    monkeypatch.setattr(deletion, "LIMIT_S", 1.5)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
async def fleet(make_fleet, registry):
    return await make_fleet(
        {"decode-0": None},
        api_keys={},
        registry=registry,
    )


async def run(fleet, *arguments: str, code: int = 0) -> str:
    given = ["tenants", *arguments, "--url", fleet.url, "--api-key", "secret"]
    result = await asyncio.to_thread(CliRunner().invoke, app, given)
    assert result.exit_code == code, result.output
    return result.output


async def test_a_team_is_limited_and_freed_again(fleet) -> None:
    quotas = fleet.router.quotas.quotas
    made = await run(fleet, "set", "team-a", "--tpm", "400000", "--rpm", "600")
    assert made == "team-a: rpm 600, tpm 400,000\n"
    assert quotas.has_limits("team-a")
    made = await run(fleet, "set", "team-a", "--rpm", "0", "--concurrent", "8")
    assert made == "team-a: tpm 400,000, concurrent 8\n"
    shown = (await run(fleet, "ls")).split("\n")
    assert [line.strip() for line in shown if "team-a" in line] == [
        "team-a  tpm 400,000, concurrent 8"
    ]
    (listed,) = json.loads(await run(fleet, "ls", "--json"))["tenants"]
    assert {name: value for name, value in listed.items() if value is not None} == {
        "tenant": "team-a",
        "tpm": 400_000,
        "concurrent": 8,
    }
    receipt = (await run(fleet, "delete", "team-a", code=1)).splitlines()
    assert receipt[0].startswith("team-a: deleted at 20")
    assert "  limits             removed" in receipt
    assert f"  confirmed by       router {fleet.lane.gateway.router_id}" in receipt
    late = "decode-0: has not confirmed; it erases its KV later"
    assert f"  not deleted        {late}" in receipt, "this worker is a script"
    assert not quotas.has_limits("team-a")
    note = "  Nothing of this tenant was found: check the name (`baton keys ls`)."
    assert note not in receipt
    assert note in (await run(fleet, "delete", "taem-a", code=1)).splitlines()


async def test_retention_is_set_and_unset(fleet) -> None:
    given = ("--keep-s", "3600", "--log-text", "off")
    assert await run(fleet, "set", "team", *given) == "team: keep_s 3,600, log_text off\n"
    assert await run(fleet, "set", "team", "--keep-s", "0", "--log-text", "on") == (
        "team: keep_s 0, log_text on\n"
    )
    shown = (await run(fleet, "ls")).split("\n")
    assert [line.strip() for line in shown if "team" in line] == ["team    keep_s 0, log_text on"]
    policies = fleet.router.policies
    assert policies.of("team").keep_s == 0 and not fleet.router.quotas.quotas.has_limits("team")
    unset = ("--keep-s", "default", "--log-text", "default")
    assert await run(fleet, "set", "team", *unset) == "team: no limits\n"
    assert json.loads(await run(fleet, "ls", "--json"))["tenants"] == []


async def test_wrong_values_are_named(fleet) -> None:
    for arguments, said in (
        (("set", "team"), "give at least one limit, such as --rpm 600"),
        (("set", "team", "--slo-ttft-s", "1"), "missing required field `itl_s` - at `$.slo`"),
        (("set", "team", "--weight", "-1"), "Expected `float` >= 0.01 - at `$.weight`"),
        (("set", "team", "--keep-s", "1d"), "--keep-s 1d: use a number of seconds, or default"),
        (("set", "team", "--log-text", "no"), "--log-text no: use on, off or default"),
        (("set", "team", "--rpm", "-3"), "Expected `int` >= 1 - at `$.rpm`"),
        (("set", "a b", "--rpm", "3"), "TENANT 'a b': must be 1 to 64 characters"),
    ):
        assert said in await run(fleet, *arguments, code=1)


ALL = (
    *("--rpm", "600", "--tpm", "400000", "--tpd", "50000000", "--concurrent", "64"),
    *("--budget-tokens", "2000000000", "--weight", "3", "--models", "tiny, tiny-fr"),
    *("--slo-ttft-s", "1.5", "--slo-itl-s", "0.05", "--kv-share", "0.3"),
)
DESCRIBED = (
    "rpm 600, tpm 400,000, tpd 50,000,000, concurrent 64, budget 2,000,000,000 tokens a month, "
    "weight 3, models tiny tiny-fr, slo ttft 1.5 s itl 0.05 s, kv_share 0.3"
)


async def test_all_fields_are_set_and_shown_at_80_columns(fleet, monkeypatch) -> None:
    name = "a-team-with-a-long-name"
    assert await run(fleet, "set", name, *ALL) == f"{name}: {DESCRIBED}\n"
    made = await run(fleet, "set", name, "--slo-itl-s", "0.1")
    assert "slo ttft 1.5 s itl 0.1 s" in made, "the other latency stays"
    monkeypatch.setenv("COLUMNS", "80")
    shown = await run(fleet, "ls")
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())
    for part in ("rpm 600", "budget 2,000,000,000", "weight 3", "models tiny tiny-fr"):
        assert part in text, shown
    removed = ("--models", "", "--budget-tokens", "0", "--slo-ttft-s", "0", "--weight", "0")
    removed += ("--kv-share", "0")
    made = await run(fleet, "set", name, *removed)
    assert made == f"{name}: rpm 600, tpm 400,000, tpd 50,000,000, concurrent 64\n"
