"""Policies of tenants at a real router: models, latencies, budget, weight, and their file."""

import asyncio
import json

import anthropic
import openai
import pytest

from baton.config.clients import ApiKeyConfig, SloConfig
from baton.config.secrets import SecretError
from baton.tenants.limits import Limits
from baton.tenants.tenants_file import TenantsFile
from router.tenants.policies import TenantPolicies
from tests.registry.conftest import redis_server, registry
from tests.router.api.test_tenant_limits import CALLS, OPS, TEAM, code_of, put
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

FREE = {"authorization": "Bearer key-of-free"}
STRICT = SloConfig(ttft_s=0.5, itl_s=0.02)
KEYS = {
    "key-of-team": ApiKeyConfig(tenant="team"),
    "strict-key-of-team": ApiKeyConfig(tenant="team", slo=STRICT),
    "key-of-free": ApiKeyConfig(tenant="free"),
}


@pytest.fixture
def start(make_fleet, registry):
    async def fleet_of(**more):
        return await make_fleet(
            {"decode-0": more.pop("script", Script(step_s=0.001))},
            api_keys=KEYS,
            registry=registry,
            **more,
        )

    return fleet_of


async def models_of(fleet, headers: dict) -> list[str]:
    answer = await fleet.http.get("/v1/models", headers=headers)
    return [entry["id"] for entry in answer.json()["data"]]


# --- models ---------------------------------------------------------------------------------------

FORBIDDEN = [*CALLS, ("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})]


async def test_another_model_is_answered_as_an_unknown_one(start) -> None:
    fleet = await start()
    await put(fleet, models=["other-model"])
    for path, body in FORBIDDEN:
        answer = await fleet.http.post(path, json={**body, "model": MODEL}, headers=TEAM)
        unknown = await fleet.http.post(path, json={**body, "model": "no-such"}, headers=TEAM)
        assert (answer.status_code, unknown.status_code) == (404, 404), answer.text
        shown, other = answer.json(), unknown.json()
        shown.pop("request_id", None), other.pop("request_id", None)  # of Anthropic's shape
        assert json.dumps(shown).replace(MODEL, "no-such") == json.dumps(other)
        allowed = await fleet.http.post(path, json={**body, "model": MODEL}, headers=FREE)
        assert allowed.status_code == 200, "other tenants are not restricted"


async def test_only_allowed_models_are_listed(start) -> None:
    fleet = await start()
    await put(fleet, models=["other-model"])
    assert await models_of(fleet, TEAM) == []
    assert (await fleet.http.get(f"/v1/models/{MODEL}", headers=TEAM)).status_code == 404
    assert await models_of(fleet, FREE) == [MODEL, "alias"]
    await put(fleet, models=[MODEL])
    assert await models_of(fleet, TEAM) == [MODEL]
    assert (await fleet.chat(headers=TEAM)).status_code == 200
    refused = await fleet.chat(headers=TEAM, model="no-such")
    assert (refused.status_code, code_of(refused)) == (404, "model_not_found")
    assert MODEL in refused.json()["error"]["message"], "it names one that is allowed"


# --- latencies and weight -------------------------------------------------------------------------


async def test_latencies_come_from_header_key_tenant_and_fleet_in_this_order(start) -> None:
    fleet = await start(slo=SloConfig(ttft_s=30, itl_s=3))

    async def slo_of(**headers: str):
        answer = await fleet.chat(headers=TEAM | headers)
        assert answer.status_code == 200
        request = next(iter(fleet.lane.gateway.kept.newest_first())).request
        return request.slo.ttft_s, request.slo.itl_s

    assert await slo_of() == (30, 3)
    await put(fleet, slo={"ttft_s": 7, "itl_s": 2})
    assert await slo_of() == (7, 2)
    assert await slo_of(**{"x-baton-slo-itl-ms": "900"}) == (7, 0.9)
    strict = {"authorization": "Bearer strict-key-of-team"}
    assert fleet.router.access.of(strict).slo == STRICT
    await put(fleet, slo={"itl_s": 1})
    assert await slo_of() == (7, 1), "the latency that is not given stays"


async def test_a_weight_reaches_the_queue_of_a_running_router(start) -> None:
    fleet = await start()
    admission, shares = fleet.lane.gateway.admission, fleet.lane.gateway.shares
    await put(fleet, weight=3)
    assert [admission._weight_of(name) for name in ("team", "free")] == [3.0, 1.0]
    assert shares._weight_of("team") == 3.0
    assert not fleet.router.quotas.quotas.has_limits("team"), "a weight alone costs no exchange"


async def test_a_share_of_the_cache_reaches_the_worker(start) -> None:
    fleet = await start()
    await put(fleet, kv_share=0.25)
    for headers in (TEAM, FREE):
        assert (await fleet.chat(headers=headers)).status_code == 200
    sent = fleet.workers["decode-0"].submissions
    assert [(one.tenant, one.kv_share) for one in sent] == [("team", 0.25), ("free", 0.0)]


# --- budget ---------------------------------------------------------------------------------------


async def test_a_spent_budget_is_refused_without_a_time_to_retry(start) -> None:
    fleet = await start()
    await put(fleet, budget={"tokens": 60}, rpm=1000)
    first = await fleet.complete("hi", headers=TEAM, max_tokens=90, ignore_eos=True)
    assert first.status_code == 200, "its prompt fits; its answer is a debt"
    assert first.headers["x-ratelimit-limit-tokens"] == "60"
    second = await fleet.complete("hi", headers=TEAM, max_tokens=4)
    error = second.json()["error"]
    assert (second.status_code, error["code"], error["type"]) == (429, *["insufficient_quota"] * 2)
    assert "budget of 60 tokens per calendar month" in error["message"]
    assert "retry-after" not in second.headers and second.headers["x-should-retry"] == "false"
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    message = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="key-of-team") as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=message, max_tokens=2)
    assert caught.value.code == "insufficient_quota"
    async with anthropic.AsyncAnthropic(base_url=fleet.url, api_key="key-of-team") as other:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await other.messages.create(model=MODEL, messages=message, max_tokens=2)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    refusals = fleet.lane.gateway.kept
    assert len(list(refusals.newest_first())) == 1, "no refused request was repeated or queued"
    await put(fleet, budget={"tokens": 10_000})
    await asyncio.sleep(0.3)  # one exchange
    assert (await fleet.complete("hi", headers=TEAM, max_tokens=4)).status_code == 200


async def test_two_routers_share_a_budget(start) -> None:
    one, two = await start(), await start()
    await put(one, budget={"tokens": 400})
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    used = refused = 0
    for number in range(100):
        fleet = (one, two)[number % 2]
        answer = await fleet.complete("hi", headers=TEAM, max_tokens=8, ignore_eos=True)
        if answer.status_code == 200:
            used += answer.json()["usage"]["total_tokens"]
        else:
            refused += 1
            assert code_of(answer) == "insufficient_quota"
    assert refused and 0.9 * 400 <= used <= 400 + 8, "the last answer may be a debt"


# --- the file -------------------------------------------------------------------------------------


async def test_the_file_is_the_only_source_and_a_wrong_one_changes_nothing(
    start, tmp_path, caplog
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("team: {weight: 3, rpm: 600}\n")
    redis_only = await start()
    await put(redis_only, "free", rpm=5)
    fleet = await start(policies=TenantPolicies(TenantsFile.beside(str(tmp_path / "keys.yaml"))))
    policies = fleet.router.policies
    assert (policies.of("team").rpm, policies.weight("team")) == (600, 3.0)
    assert policies.of("free").rpm is None, "Redis has no part in it"
    assert fleet.router.quotas.quotas.has_limits("team")
    refused = (await put(fleet, status=400, rpm=1))["error"]["message"]
    assert str(path) in refused
    path.write_text("team: {weight: 3, rpm: 700, models: [a]}\n")
    await until(lambda: policies.of("team").rpm == 700, 2.0)
    assert await stale(fleet) == 0
    path.write_text("other: {rpm: 1}\nteam: {weight: 3, rpm: many}\n")
    await until(lambda: "previous value stays" in caplog.text, 2.0)
    assert f"{path}:2: team: Expected `int | null`, got `str` - at `$.rpm`" in caplog.text
    assert policies.of("team").rpm == 700 and await stale(fleet) == 1
    path.unlink()
    await until(lambda: "cannot be read" in caplog.text, 2.0)
    assert policies.of("team").rpm == 700, "a missing file leaves the last good one too"
    path.write_text("{}\n")
    await until(lambda: policies.of("team").rpm is None, 2.0)
    assert await stale(fleet) == 0 and not fleet.router.quotas.quotas.has_limits("team")
    assert policies.of("free").rpm is None


async def test_a_file_that_appears_later_takes_over(start, tmp_path, caplog) -> None:
    source = TenantsFile.beside(str(tmp_path / "keys.yaml"))
    fleet = await start(policies=TenantPolicies(source))
    policies = fleet.router.policies
    await put(fleet, rpm=5)
    path = tmp_path / "tenants.yaml"
    path.write_text("team: 5\n")
    await until(lambda: "previous policies stay" in caplog.text, 2.0)
    assert policies.of("team").rpm == 5 and await stale(fleet) == 1
    path.write_text("team: {rpm: 6}\n")
    await until(lambda: policies.of("team").rpm == 6, 2.0)
    assert await stale(fleet) == 0


async def stale(fleet) -> float:
    page = (await fleet.http.get("/metrics", headers=OPS)).text
    (line,) = [line for line in page.splitlines() if 'baton_file_stale{file="tenants"}' in line]
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("team: {rpm: 0}", ":1: team: Expected `int` >= 1 - at `$.rpm`"),
        ("a: {}\nteam: {kv: 1}", ":2: team: Object contains unknown field `kv`"),
        ("team: {slo: {ttft_s: 1}}", ":1: team: Object missing required field `itl_s`"),
        ("a b: {rpm: 1}", ":1: a b: a tenant's name must be"),
        ("team: {rpm: 1}\nteam: {rpm: 2}", ":2: team is given twice"),
        ("<<: {team: {rpm: 0}}", ":1: team: Expected `int` >= 1 - at `$.rpm`"),  # was a KeyError
        ("- team", ":1: a file of tenants must consist of `key: value` lines"),
    ],
)
def test_a_wrong_file_names_line_tenant_and_field_at_the_start(tmp_path, text, message) -> None:
    (tmp_path / "tenants.yaml").write_text(text)
    with pytest.raises(SecretError) as caught:
        TenantsFile.beside(str(tmp_path / "keys.yaml"))
    assert message in str(caught.value)


def test_keys_outside_of_files_have_no_tenants_file() -> None:
    assert TenantsFile.beside(None) is None and TenantsFile.beside("redis") is None


# --- metrics --------------------------------------------------------------------------------------


async def series(fleet, name: str) -> dict[str, float]:
    page = (await fleet.http.get("/metrics", headers=OPS)).text
    lines = [line.split() for line in page.splitlines() if line.startswith(name)]
    return {key.removeprefix(name): float(value) for key, value in lines}


async def test_metrics_show_use_limit_debt_and_refusals_by_tenant(start) -> None:
    fleet = await start()
    await put(fleet, budget={"tokens": 60}, tpm=5000)
    first = await fleet.complete("hi", headers=TEAM, max_tokens=90, ignore_eos=True)
    used = first.json()["usage"]["total_tokens"]
    assert used > 60
    assert (await fleet.complete("hi", headers=TEAM, max_tokens=4)).status_code == 429
    tokens = await series(fleet, "baton_quota_tokens")
    assert tokens == {
        '{kind="tpm",tenant="team"}': used,
        '{kind="budget",tenant="team"}': used,
    }
    limits = await series(fleet, "baton_quota_limit_tokens")
    assert limits == {
        '{kind="tpm",tenant="team"}': 5000,
        '{kind="budget",tenant="team"}': 60,
    }
    assert await series(fleet, "baton_quota_debt_tokens") == {"": used - 60}
    refusals = await series(fleet, "baton_quota_refusals_total")
    assert refusals == {'{limit="budget",tenant="team"}': 1}
    await put(fleet, budget=None, tpm=None)
    assert set((await series(fleet, "baton_quota_tokens")).values()) == {0}
    assert set((await series(fleet, "baton_quota_limit_tokens")).values()) == {0}


async def test_metrics_show_a_bounded_number_of_tenants(start) -> None:
    fleet = await start()
    quotas = fleet.router.quotas
    quotas.quotas.set_limits({f"t{n}": Limits(tpm=100, tpd=100) for n in range(300)})
    for number in range(300):
        await quotas.reserve(f"t{number}", 1, 1, 1)
    found = await series(fleet, "baton_quota_tokens")
    assert len(found) == 2 * 80 and not any("other" in key for key in found)


# --- the list -------------------------------------------------------------------------------------


async def listed(fleet, headers: dict, query: str = "") -> dict:
    answer = await fleet.http.get(f"/fleet/tenants{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_tenant_sees_itself_only_and_operators_see_all_in_natural_order(start) -> None:
    fleet = await start()
    for name in ("team-10", "team-9", "team", "other"):
        await put(fleet, name, rpm=5)
    found = await listed(fleet, OPS)
    assert [row["tenant"] for row in found["tenants"]] == ["other", "team", "team-9", "team-10"]
    found = await listed(fleet, OPS, "?limit=2")
    assert [row["tenant"] for row in found["tenants"]] == ["other", "team"]
    assert found["total"] == 4
    own = await listed(fleet, TEAM)
    assert [row["tenant"] for row in own["tenants"]] == ["team"] and own["total"] == 1
    assert (await listed(fleet, FREE))["tenants"] == []
    assert (await fleet.http.get("/fleet/tenants")).status_code == 401
    assert (await fleet.http.get("/fleet/tenants?limit=101", headers=OPS)).status_code == 400


async def test_the_list_shows_use_at_other_routers(start) -> None:
    """Leases ahead of calls tell each router."""
    one, two = await start(), await start()
    await put(one, budget={"tokens": 5000})
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    used = (await one.complete("hi", headers=TEAM)).json()["usage"]["total_tokens"]
    await asyncio.sleep(1.5)
    (row,) = (await listed(two, OPS, "?limit=50"))["tenants"]
    assert row["used"] == {"budget": used}


async def test_the_list_shows_use_at_other_routers_while_it_is_watched(start) -> None:
    one, two = await start(), await start()
    await put(one, budget={"tokens": 5000}, concurrent=1)  # too few to lease ahead of calls
    await until(lambda: two.router.quotas.quotas.has_limits("team"))
    used = (await one.complete("hi", headers=TEAM)).json()["usage"]["total_tokens"]
    await asyncio.sleep(1.5)  # unused leases return
    assert "used" not in (await listed(two, OPS))["tenants"][0]
    first = (await listed(two, OPS, "?limit=50"))["tenants"][0]
    assert first["used"]["budget"] == 0, "it has not served the tenant"
    await asyncio.sleep(0.5)
    (row,) = (await listed(two, TEAM, "?limit=50"))["tenants"]
    assert row["used"]["budget"] == used and row["budget"] == {"tokens": 5000}
