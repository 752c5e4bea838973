"""`GET /fleet/requests`: the list, the story of one, and the seconds, of a real router."""

import asyncio

import pytest

from baton.config.clients import ApiKeyConfig
from tests.router.conftest import until
from tests.router.emulated_worker import Script

FLEET = {"prefill-0": None, "decode-0": None}
KEYS = {
    "key-one": ApiKeyConfig(tenant="one"),
    "key-two": ApiKeyConfig(tenant="two"),
    "key-op": ApiKeyConfig(tenant="ops", role="operator"),
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def listed(fleet, query: str = "", headers: dict | None = None) -> list[dict]:
    answer = await fleet.http.get(f"/fleet/requests{query}", headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


async def told(fleet, name: str) -> dict:
    """The story of a request that its worker has confirmed."""
    await until(lambda: fleet.lane.gateway.kept.get(name).observed)
    return (await fleet.http.get(f"/fleet/requests/{name}")).json()


async def test_the_list_has_the_newest_or_the_slowest_first(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    ids = [(await fleet.chat(max_tokens=n)).json()["id"] for n in (2, 40, 16)]
    assert [one["id"] for one in await listed(fleet)] == ids[::-1]
    assert [one["id"] for one in await listed(fleet, "?order=slowest")] == [
        ids[1],
        ids[2],
        ids[0],
    ]
    assert len(await listed(fleet, "?limit=2")) == 2
    first = (await listed(fleet))[-1]
    assert (first["state"], first["completion_tokens"], first["decode"]) == ("ended", 2, "decode-0")
    assert 0 < first["first_token_s"] <= first["elapsed_s"]
    for bad in ("?limit=0", "?limit=501", "?limit=x", "?order=fast"):
        assert (await fleet.http.get(f"/fleet/requests{bad}")).status_code in (400, 422)


async def test_a_tenant_sees_its_own_and_an_operator_all(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    for key in ("key-one", "key-two", "key-two"):
        await fleet.chat("a secret", headers=bearer(key))
    assert [one["tenant"] for one in await listed(fleet, headers=bearer("key-one"))] == ["one"]
    everybody = await listed(fleet, headers=bearer("key-op"))
    assert [one["tenant"] for one in everybody] == ["two", "two", "one"]
    assert "secret" not in str(everybody)
    assert (await fleet.http.get("/fleet/requests")).status_code == 401
    assert (await fleet.http.get("/fleet/series", headers=bearer("key-one"))).status_code == 403
    assert (await fleet.http.get("/fleet/series", headers=bearer("key-op"))).status_code == 200


async def test_a_slow_prefill_worker_is_named_by_the_story(make_fleet):
    fleet = await make_fleet(
        {
            "prefill-0": Script(prefill_tokens_per_s=4000),
            "prefill-1": Script(prefill_tokens_per_s=4000),
            # The emulated decode worker stands for the slow prefill worker that it reports of.
            "decode-0": Script(prefill_s=0.6),
        }
    )
    disaggregated = {"x-baton-mode": "disaggregated"}
    answer = await fleet.chat("a secret " * 8, headers=disaggregated, max_tokens=4)
    story = await told(fleet, answer.json()["id"])
    assert story["why"]["cause"] == "slow_prefill_worker", story["why"]
    assert story["route"]["prefill"] in story["why"]["sentence"]
    assert "secret" not in str(story)
    assert story["phases_s"]["prefill"] > 0.5
    assert story["regret_s"] > 0.5
    assert story["better"]["prefill"] != story["route"]["prefill"]
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_router_regret_seconds_count{mode="disaggregated"} 1.0' in page


async def test_a_wait_for_the_only_place_is_told_as_the_queue(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.05)}, window_requests=1)
    first = asyncio.create_task(fleet.chat(max_tokens=12))
    await until(lambda: fleet.lane.gateway.in_flight == 1)
    second = asyncio.create_task(fleet.chat(max_tokens=2))
    await until(lambda: fleet.lane.gateway.admission.waiting == 1)
    [waiting] = await listed(fleet, "?limit=1")
    assert (waiting["state"], waiting["cause"]) == ("queued", "queued")
    assert (await first).status_code == 200
    story = await told(fleet, (await second).json()["id"])
    assert story["why"]["cause"] == "queued", story
    assert story["why"]["cost_s"] > 0.2


async def test_an_answer_that_stood_still_is_told_with_its_place(make_fleet):
    script = Script(step_s=0.01)
    fleet = await make_fleet({"decode-0": script})
    answering = asyncio.create_task(fleet.chat(max_tokens=30))
    await until(lambda: any(a.record.begun for a in fleet.lane.gateway.kept.newest_first()))
    script.step_s = 0.7
    await asyncio.sleep(0.3)
    script.step_s = 0.01
    story = await told(fleet, (await answering).json()["id"])
    assert story["why"]["cause"] == "stalled", story["why"]
    assert story["longest_gaps"][0]["gap_s"] > 0.5
    assert 0 < story["longest_gaps"][0]["before_token"] < 30


async def test_a_replaced_prefill_worker_is_told_with_the_reason(make_fleet):
    fleet = await make_fleet(
        {"prefill-0": None, "prefill-1": None, "decode-0": Script(need_prefill=True, prefill_s=0)}
    )
    answer = await fleet.chat(headers={"x-baton-mode": "disaggregated"}, max_tokens=2)
    story = await told(fleet, answer.json()["id"])
    assert any("it broke" in event["event"] for event in story["timeline"])
    assert story["regret_s"] is None, "it did not run as it was placed"


async def test_the_seconds_are_sampled(make_fleet):
    fleet = await make_fleet(FLEET)
    await fleet.chat(headers={"x-baton-mode": "disaggregated"}, max_tokens=6)

    async def samples() -> dict:
        return (await fleet.http.get("/fleet/series")).json()

    await until(lambda: fleet.router.observer.series.after(0), 3)
    series = await samples()
    while sum(sample["generated_tokens"] for sample in series["samples"]) < 6:
        await asyncio.sleep(0.2)
        series = await samples()
    assert sum(sample["ended"] for sample in series["samples"]) == 1
    assert any(sample["handoffs"] == {"prefill-0>decode-0": 1} for sample in series["samples"])
    assert any((sample["ttft_p50_s"] or 0) > 0 for sample in series["samples"])
    assert series["workers"]["prefill-0"]["prefill_tokens_per_s"] == pytest.approx(3000)
    last = series["samples"][-1]["number"]
    newer = (await fleet.http.get(f"/fleet/series?after={last}")).json()["samples"]
    assert all(sample["number"] > last for sample in newer)
