"""``/fleet/keys``: keys that are issued, rotated, revoked and imported while routers serve."""

import asyncio
import json
import logging
import time

import anthropic
import openai
import pytest

from baton.config.clients import ApiKeyConfig
from baton.config.logs import LogsConfig
from baton.tenants.key_record import issue, new_key
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

__all__ = ["redis_server", "registry"]

OPS = {"authorization": "Bearer secret"}  # the fleet's token
UNKNOWN = "a valid API key is required: `Authorization: Bearer KEY` or `x-api-key: KEY`"


@pytest.fixture
def start(make_fleet, registry):
    """A router of a fleet whose keys are in Redis: ``await start(keys={…})``."""

    async def fleet_of(keys: dict | None = None, **more):
        return await make_fleet(
            {"decode-0": Script(step_s=0.001)},
            api_keys={} if keys is None else keys,
            registry=registry,
            **more,
        )

    return fleet_of


def sent(key: str, tenant: str = "team", expires_s: float | None = None, **rights) -> dict:
    record = issue(key, {"tenant": tenant, **rights})
    return {
        "id": record.id,
        "sha256": record.sha256,
        "rights": record.rights,
        "expires_s": expires_s,
        "by_hash": record.by_hash,
    }


async def create(fleet, *keys: dict, status: int = 200) -> dict:
    answer = await fleet.http.post("/fleet/keys", json={"keys": keys}, headers=OPS)
    assert answer.status_code == status, answer.text
    return answer.json()


async def rotate(fleet, old: str, new: str, overlap_s: float, status: int = 200, **more) -> dict:
    body = {"overlap_s": overlap_s, **more}
    body |= {name: value for name, value in sent(new).items() if name in ("id", "sha256")}
    answer = await fleet.http.post(f"/fleet/keys/{id_of(old)}/rotate", json=body, headers=OPS)
    assert answer.status_code == status, answer.text
    return answer.json()


async def revoke(fleet, key: str, status: int = 200) -> dict:
    answer = await fleet.http.delete(f"/fleet/keys/{id_of(key)}", headers=OPS)
    assert answer.status_code == status, answer.text
    return answer.json()


async def listed(fleet) -> dict[str, dict]:
    answer = await fleet.http.get("/fleet/keys", headers=OPS)
    return {key["id"]: key for key in answer.json()["keys"]}


def id_of(key: str) -> str:
    return issue(key, {}).id


async def refusal(fleet, key: str) -> str:
    """Why a key is refused; empty if it is not."""
    answer = await fleet.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    if answer.status_code == 200:
        return ""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
    assert key not in answer.text
    return error["message"]


async def test_a_key_is_accepted_by_all_routers_until_it_is_revoked(start):
    one, two = await start(), await start()
    key, other = new_key(), new_key()
    assert await refusal(one, key) == UNKNOWN
    made = (await create(one, sent(key, role="operator", min_priority=-3), sent(other)))["keys"][0]
    shown = {"id": key[3:15], "tenant": "team", "role": "operator", "min_priority": -3}
    assert made.items() >= shown.items() and made["state"] == "valid"
    assert await refusal(one, key) == "", "at once where it was made"
    while await refusal(two, key):
        await asyncio.sleep(0.01)
    assert (await one.http.get("/fleet", headers={"x-api-key": key})).status_code == 200
    assert (await one.http.get("/fleet", headers={"x-api-key": other})).status_code == 403
    chat = await two.chat(headers={"authorization": f"Bearer {other}"})
    assert chat.status_code == 200
    asked = next(two.lane.gateway.kept.newest_first()).request
    assert asked.tenant == "team"

    found = await revoke(two, other)
    assert (found["id"], found["state"]) == (id_of(other), "revoked")
    text = f"the API key {id_of(other)} is revoked; use another one"
    assert await refusal(two, other) == text
    while not await refusal(one, other):
        await asyncio.sleep(0.01)
    assert await refusal(one, other) == text
    assert await refusal(one, key) == ""
    again = await revoke(one, other)
    assert again["state"] == "revoked"
    states = {name: key["state"] for name, key in (await listed(two)).items()}
    assert states == {id_of(key): "valid", id_of(other): "revoked"}


async def test_only_the_right_secret_learns_why_it_is_refused(start):
    fleet = await start()
    expired, revoked = new_key(), new_key()
    await create(fleet, sent(expired, expires_s=0.001), sent(revoked))
    await revoke(fleet, revoked)
    await asyncio.sleep(0.01)
    assert (
        await refusal(fleet, expired) == f"the API key {id_of(expired)} is expired; use another one"
    )
    for key in (expired, revoked):
        wrong = key[:16] + new_key()[16:]
        assert await refusal(fleet, wrong) == UNKNOWN
    assert (
        await fleet.http.get("/health/ready", headers={"x-api-key": revoked})
    ).status_code == 200


async def test_official_clients_raise_their_own_errors(start):
    fleet = await start()
    expired, revoked, valid = new_key(), new_key(), new_key()
    await create(fleet, sent(expired, expires_s=0.001), sent(revoked), sent(valid))
    await revoke(fleet, revoked)
    await asyncio.sleep(0.01)
    turn = [{"role": "user", "content": "hi"}]

    async def by_openai(key: str):
        base = f"{fleet.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            return await client.chat.completions.create(model=MODEL, messages=turn, max_tokens=2)

    async def by_anthropic(key: str):
        async with anthropic.AsyncAnthropic(
            base_url=fleet.url, api_key=key, max_retries=0
        ) as client:
            return await client.messages.create(model=MODEL, messages=turn, max_tokens=2)

    assert (await by_openai(valid)).usage.completion_tokens == 2
    assert (await by_anthropic(valid)).usage.output_tokens == 2
    for key, why in ((expired, "is expired"), (revoked, "is revoked"), (new_key(), "required")):
        with pytest.raises(openai.AuthenticationError, match=why) as caught:
            await by_openai(key)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(anthropic.AuthenticationError, match=why) as theirs:
            await by_anthropic(key)
        assert theirs.value.body["error"]["type"] == "authentication_error"


async def test_a_rotation_refuses_no_request(start):
    """Clients of two routers use the old key until they have the new one."""
    fleets = [await start(), await start()]
    key = new_key()
    await create(fleets[0], sent(key))
    while await refusal(fleets[1], key):
        await asyncio.sleep(0.01)
    current = [key]
    ended = asyncio.Event()
    statuses: list[int] = []

    async def client(number: int) -> None:
        while not ended.is_set():
            headers = {"authorization": f"Bearer {current[-1]}"}
            answer = await fleets[number % 2].chat(headers=headers, max_tokens=1)
            statuses.append(answer.status_code)

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    for _ in range(2):
        new = new_key()
        found = await rotate(fleets[0], current[-1], new, overlap_s=60)
        assert (found["old"]["state"], found["new"]["state"]) == ("valid", "valid")
        assert found["old"]["replaced_by"] == id_of(new)
        while await refusal(fleets[1], new):  # `baton keys rotate` waits a second
            await asyncio.sleep(0.01)
        current.append(new)
        before = len(statuses)
        await until(lambda before=before: len(statuses) > before + 20, timeout_s=20)
    ended.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert [await refusal(fleets[0], old) for old in current] == ["", "", ""]


async def test_a_rotated_key_ends_after_the_overlap_and_its_successor_has_its_rights(start):
    fleet = await start()
    first, second, third, fourth = (new_key() for _ in range(4))
    await create(fleet, sent(first, "ops", expires_s=3600, role="operator", min_priority=-7))
    found = await rotate(fleet, first, second, overlap_s=0)
    assert "is expired" in await refusal(fleet, first)
    assert (await fleet.http.get("/fleet", headers={"x-api-key": second})).status_code == 200
    lifetime_s = found["new"]["expires"] - found["new"]["created"]
    assert (found["new"]["min_priority"], lifetime_s) == (-7, 3600)
    kept = {name: found["old"][name] for name in ("tenant", "role", "adapters", "slo", "log_text")}
    assert found["new"].items() >= kept.items()
    for old, why in ((first, "replaced by"), (new_key(), "no API key has the id")):
        status = 400 if old == first else 404
        answer = await rotate(fleet, old, third, overlap_s=0, status=status)
        assert why in answer["error"]["message"]
    found = await rotate(fleet, second, third, overlap_s=9, expires_s=60)
    assert found["new"]["expires"] - found["new"]["created"] == 60
    await revoke(fleet, third)
    assert "is revoked" in (await rotate(fleet, third, fourth, 0, status=400))["error"]["message"]
    assert await refusal(fleet, fourth) == UNKNOWN
    assert await refusal(fleet, second) == ""


async def test_lines_of_the_fleet_file_count_beside_issued_keys_and_can_be_imported(start):
    lines = {
        "key-of-a-team": ApiKeyConfig(tenant="a"),
        "key-of-b-team": ApiKeyConfig(tenant="b", min_priority=5),
    }
    fleet = await start(lines)
    assert [await refusal(fleet, key) for key in lines] == ["", ""]
    bodies = [sent(k, **v.model_dump(mode="json", exclude_defaults=True)) for k, v in lines.items()]
    assert (await create(fleet, *bodies))["added"] == 2
    assert (await create(fleet, *bodies))["added"] == 0
    assert [await refusal(fleet, key) for key in lines] == ["", ""]
    without = await start()  # whose file has none of the lines
    assert [await refusal(without, key) for key in lines] == ["", ""]
    late = await without.chat(headers={"x-api-key": "key-of-b-team"}, priority=4)
    assert late.status_code == 400 and "priority" in late.text
    await revoke(fleet, "key-of-a-team")
    assert "is revoked" in await refusal(fleet, "key-of-a-team"), "although it has its line"
    own = {"authorization": f"Bearer {fleet.router.access.own_key}"}
    for tenant, status in (("a", 401), ("b", 200)):  # the lines of its batch
        answer = await fleet.chat(headers=own | {"x-baton-tenant": tenant})
        assert answer.status_code == status
    assert await refusal(fleet, "key-of-b-team") == ""


async def test_a_fleet_that_checks_no_keys_issues_none(make_fleet, registry):
    fleet = await make_fleet({"decode-0": None}, registry=registry)
    for call in (
        fleet.http.get("/fleet/keys"),
        fleet.http.post("/fleet/keys", json={"keys": [sent(new_key())]}, headers=OPS),
        fleet.http.post("/fleet/keys/aaaaaaaaaaaa/rotate", json={}, headers=OPS),
        fleet.http.delete("/fleet/keys/aaaaaaaaaaaa", headers=OPS),
    ):
        answer = await call
        assert answer.status_code == 400
        assert "`clients: {api_keys_file: redis}`" in answer.json()["error"]["message"]
    assert (await registry.send(("KEYS", "*")))[0] == []
    assert (await fleet.chat()).status_code == 200


async def test_without_redis_keys_stay_as_they_are_and_changes_fail(start, redis_server, caplog):
    fleet = await start()
    key, other, ended = new_key(), new_key(), new_key()
    await create(fleet, sent(key), sent(ended))
    redis_server.kill()
    await until(lambda: "using the last known API keys=2" in caplog.text)
    assert await refusal(fleet, key) == ""
    for answer in (
        await create(fleet, sent(other), status=503),
        await rotate(fleet, key, other, 0, status=503),
    ):
        assert "Redis is unavailable" in answer["error"]["message"]
    assert await refusal(fleet, key) == ""
    assert await refusal(fleet, other) == UNKNOWN
    assert (await revoke(fleet, ended))["everywhere"] is False
    assert "is revoked" in await refusal(fleet, ended)
    await revoke(fleet, other, status=404)
    await asyncio.sleep(0.3)
    found = (await fleet.http.get("/fleet/keys", headers=OPS)).json()
    assert found["age_s"] > 0.2
    page = (await fleet.http.get("/metrics", headers=OPS)).text
    assert 'baton_keys{state="valid"} 1.0' in page or '"valid"} 1.0' in page
    age = next(line for line in page.splitlines() if line.startswith("baton_keys_age_seconds"))
    assert float(age.split()[-1]) > 0.2


async def test_a_router_that_restarts_without_redis_knows_the_keys(start, redis_server, tmp_path):
    key, ended = new_key(), new_key()
    first = await start(state_dir=str(tmp_path))
    await create(first, sent(key), sent(ended))
    await revoke(first, ended)
    redis_server.kill()
    again = await start(state_dir=str(tmp_path))
    assert await refusal(again, key) == ""
    assert "is revoked" in await refusal(again, ended)


async def test_no_secret_is_in_redis_in_the_state_folder_or_in_a_log(
    start, registry, tmp_path, caplog, capfd
):
    with caplog.at_level(logging.DEBUG):
        fleet = await start(state_dir=str(tmp_path), logs=LogsConfig(requests=True, format="json"))
        keys = [new_key() for _ in range(3)] + ["sk-imported-from-a-file"]
        successor = new_key()
        await create(fleet, *(sent(key, log_text=True) for key in keys[:3]), sent(keys[3]))
        await rotate(fleet, keys[0], successor, overlap_s=60)
        await revoke(fleet, keys[1])
        for key in (*keys, successor):
            headers = {"authorization": f"Bearer {key}"}
            await fleet.chat(headers=headers)
            await fleet.http.post("/v1/messages", json={"x": 1}, headers={"x-api-key": key})
        shown = (await fleet.http.get("/fleet/keys", headers=OPS)).text
    secrets = [key[16:] for key in (*keys[:3], successor)] + [keys[3]]
    texts = [shown, caplog.text, *capfd.readouterr()]
    texts += [file.read_text("latin-1") for file in tmp_path.rglob("*") if file.is_file()]
    (names,) = await registry.send(("KEYS", "*"))
    for name in names:
        (raw,) = await registry.send(("DUMP", name))
        texts += [name.decode(), raw.decode("latin-1")]
    assert len(names) >= 2 and any(keys[0][3:15] in text for text in texts)
    assert [secret[:6] for secret in secrets for text in texts if secret in text] == []
    digests = [issue(key, {}).sha256 for key in keys]
    assert not any(digest in shown or digest in caplog.text for digest in digests)


async def test_texts_are_logged_while_a_key_that_allows_it_is_valid(start, caplog):
    fleet = await start(logs=LogsConfig(requests=True, format="json"))
    quiet, logged = new_key(), new_key()
    await create(fleet, sent(quiet), sent(logged, log_text=True))

    def logged_lines() -> list:
        return [line for line in caplog.records if line.name == "baton.requests"]

    async def has_text() -> bool:
        caplog.clear()
        await fleet.chat("the armadillo", {"authorization": f"Bearer {quiet}"})
        await until(logged_lines)
        [line] = logged_lines()
        return "armadillo" in getattr(line, "prompt", "")

    with caplog.at_level(logging.INFO):
        assert await has_text(), "it is a matter of the tenant"
        await revoke(fleet, logged)
        assert not await has_text()


async def test_the_last_day_of_use_is_listed(start):
    fleet = await start()
    key, idle = new_key(), new_key()
    await create(fleet, sent(key), sent(idle))
    assert await refusal(fleet, key) == ""
    found = await listed(fleet)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert found[id_of(key)]["last_used"] in (today, time.strftime("%Y-%m-%d", time.gmtime()))
    assert found[id_of(idle)]["last_used"] is None
    assert not {"sha256", "by_hash"} & set(found[id_of(key)])


async def test_a_batch_runs_with_the_rights_of_its_tenant_while_that_has_a_valid_key(
    start, tmp_path
):
    """Keys are not stored, so the router's own calls cannot use one."""
    fleet = await start(state_dir=str(tmp_path))
    key, successor = new_key(), new_key()
    await create(fleet, sent(key, min_priority=3))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "x"}],
    }
    base = f"{fleet.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
        raw = json.dumps(line).encode()
        file = await client.files.create(file=("in.jsonl", raw), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        for _ in range(400):
            if (made := await client.batches.retrieve(made.id)).status == "completed":
                break
            await asyncio.sleep(0.05)
        assert made.request_counts.completed == 1, made

    own = fleet.router.access.own_key
    as_team = {"authorization": f"Bearer {own}", "x-baton-tenant": "team"}
    assert (await fleet.chat(headers=as_team, priority=2)).status_code == 400
    assert (await fleet.chat(headers=as_team)).status_code == 200
    for headers in (as_team | {"x-baton-tenant": "stranger"}, {"x-baton-tenant": "team"}):
        assert (await fleet.chat(headers=headers)).status_code == 401
    await rotate(fleet, key, successor, overlap_s=0)
    assert (await fleet.chat(headers=as_team)).status_code == 200
    await revoke(fleet, successor)
    refused = await fleet.chat(headers=as_team)
    assert refused.status_code == 401 and "no valid API key any more" in refused.text


async def test_what_cannot_be_issued_is_named(start):
    fleet = await start()
    for change, said in (
        ({"id": "ABC"}, "keys[0].id"),
        ({"sha256": "0"}, "keys[0].sha256"),
        ({"expires_s": 0}, "keys[0].expires_s"),
        ({"rights": {"tenant": "a b"}}, "keys[0].rights.tenant"),
        ({"rights": {"tenant": "a", "role": "king"}}, "keys[0].rights.role"),
        ({"secret": "x"}, "keys[0].secret"),
        ({"rights": {"log_text": True}}, "log_text needs"),
        ({"rights": {"adapters": "own"}}, "`adapters: own` needs"),
    ):
        answer = await create(fleet, sent(new_key()) | change, status=400)
        assert said in answer["error"]["message"]
        assert await listed(fleet) == {}
