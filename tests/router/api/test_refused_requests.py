"""Each refused request can be found by the id in its response, by operators and its own tenant."""

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from baton.config.clients import ApiKeyConfig
from router.routing.reports.past_reports import PastReports
from router.routing.reports.request_reports import past_reports
from tests.router.api.test_tracing import recorded
from tests.router.conftest import until
from tests.router.emulated_worker import Script

KEYS = {
    "sk-one": ApiKeyConfig(tenant="one"),
    "sk-two": ApiKeyConfig(tenant="two"),
    "sk-operator": ApiKeyConfig(tenant="ops", role="operator"),
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def report(fleet, name: str, headers: dict[str, str] | None = None) -> dict:
    answer = await fleet.http.get(f"/fleet/requests/{name}", headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_request_that_no_worker_could_get_is_found_and_its_span_is_an_error(make_fleet):
    fleet = await make_fleet({})
    exporter = recorded(fleet)
    answer = await fleet.chat(stream=True)
    assert answer.status_code == 503
    name = answer.headers["x-request-id"]
    found = await report(fleet, name)
    assert (found["id"], found["status"], found["state"]) == (name, 503, "refused")
    assert found["error"]["code"] == answer.json()["error"]["code"]
    assert answer.json()["error"]["message"] in found["why"]["sentence"]
    [listed] = (await fleet.http.get("/fleet/requests")).json()["requests"]
    assert (listed["id"], listed["status"], listed["error"]) == (
        name,
        503,
        found["error"]["code"],
    )
    [span] = [one for one in exporter.get_finished_spans() if one.kind is SpanKind.SERVER]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == found["error"]["code"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"temperature": -1}, 400), ({"model": "unknown"}, 404), ({"max_tokens": "x"}, 400)],
)
async def test_a_request_with_a_mistake_is_found_by_either_id(make_fleet, body, status):
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.chat(**body)
    assert answer.status_code == status
    found = await report(fleet, answer.headers["x-request-id"])
    assert (found["status"], found["client_request_id"]) == (status, None)
    again = await fleet.chat(**body, headers={"x-request-id": "mine"})
    assert again.headers["x-request-id"] == "mine"
    found = await report(fleet, "mine")
    assert (found["status"], found["client_request_id"]) == (status, "mine")
    assert answer.json()["error"]["message"] in found["why"]["sentence"]


async def test_refused_requests_are_their_tenants_own(make_fleet):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    answer = await fleet.chat(temperature=-1, headers=bearer("sk-one"))
    name = answer.headers["x-request-id"]
    stranger = await fleet.chat(headers=bearer("sk-wrong"))
    assert (answer.status_code, stranger.status_code) == (400, 401)

    async def ids(key: str) -> list[str]:
        listed = await fleet.http.get("/fleet/requests", headers=bearer(key))
        return [one["id"] for one in listed.json()["requests"]]

    assert await ids("sk-one") == [name]
    assert await ids("sk-two") == []
    assert await ids("sk-operator") == [stranger.headers["x-request-id"], name]
    other = await fleet.http.get(f"/fleet/requests/{name}", headers=bearer("sk-two"))
    assert other.status_code == 404
    assert (await report(fleet, name, bearer("sk-one")))["tenant"] == "one"


async def test_reports_are_left_for_the_next_process(make_fleet, tmp_path):
    fleet = await make_fleet({"decode-0": None}, api_keys=KEYS)
    served = await fleet.chat(headers=bearer("sk-one"))
    refused = await fleet.chat(temperature=-1, headers=bearer("sk-two"))
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    parts = fleet.router
    name = served.json()["id"]
    report_before = await report(fleet, name, bearer("sk-one"))
    file = tmp_path / "0.reports"
    PastReports(file).keep(
        past_reports(parts.lanes.first.gateway.kept.newest_first(), parts.refused.newest_first())
    )

    later = await make_fleet({"decode-0": None}, api_keys=KEYS)
    later.router.past_reports.file = file
    assert await report(later, name, bearer("sk-one")) == report_before
    hidden = await later.http.get(f"/fleet/requests/{name}", headers=bearer("sk-two"))
    assert hidden.status_code == 404
    listed = await later.http.get("/fleet/requests", headers=bearer("sk-operator"))
    found = [one["id"] for one in listed.json()["requests"]]
    assert found == [refused.headers["x-request-id"], name]
    own = await later.http.get("/fleet/requests", headers=bearer("sk-one"))
    assert [one["id"] for one in own.json()["requests"]] == [name]
    file.write_bytes(b"garbage")
    assert (await later.http.get("/fleet/requests", headers=bearer("sk-one"))).status_code == 200


async def test_reports_have_the_same_fields_whether_refused_or_served(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.05)}, kept_records=3)
    served = await fleet.chat()
    await until(lambda: fleet.lane.gateway.in_flight == 0)
    refused = [await fleet.chat(temperature=-1) for _ in range(5)]
    names = [one.headers["x-request-id"] for one in refused]
    listed = (await fleet.http.get("/fleet/requests")).json()["requests"]
    assert [one["id"] for one in listed] == [*reversed(names[2:]), served.json()["id"]]
    assert set(listed[0]) == set(listed[-1])
    assert listed[-1]["status"] == 200
    old = await fleet.http.get(f"/fleet/requests/{names[0]}")
    assert old.status_code == 404, "the oldest are forgotten"
    served_report = await report(fleet, served.json()["id"])
    assert set(await report(fleet, names[-1])) == set(served_report)
    assert served_report["status"] == 200
    shortest = (await fleet.http.get("/fleet/requests?order=slowest&limit=1")).json()["requests"]
    assert [one["id"] for one in shortest] == [served.json()["id"]]
