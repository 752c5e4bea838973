"""A router of a fleet that may have no workers: requests wait for the first one."""

import asyncio

import pytest

from baton.registry.router_demands import PlannedSizes
from baton.registry.types import WorkerRecord
from tests.router.conftest import until
from tests.router.emulated_worker import Script

STRICT = {"x-baton-slo-ttft-ms": "1", "x-baton-slo-itl-ms": "1000"}


def starting(worker_id: str, role: str) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, role=role, state="starting", epoch=1)


async def test_requests_wait_for_the_first_worker_and_are_not_late(make_fleet):
    """The time of its start counts for no latency limit."""
    fleet = await make_fleet({}, starts_from_zero=True)
    calls = [asyncio.create_task(fleet.chat(headers=STRICT)) for _ in range(3)]
    await until(lambda: fleet.lane.gateway.admission.waiting == 3)
    assert fleet.lane.gateway.work.demand().waiting.count == 3, "the controller sees them"
    await asyncio.sleep(0.1)
    await fleet.add("decode-0")
    assert [(await call).status_code for call in calls] == [200, 200, 200]
    assert fleet.lane.gateway.admission.running == 0


async def test_a_disaggregated_request_waits_for_the_role_that_still_starts(make_fleet):
    fleet = await make_fleet({}, starts_from_zero=True)
    mode = {"x-baton-mode": "disaggregated"}
    call = asyncio.create_task(fleet.chat(headers=mode))
    await until(lambda: fleet.lane.gateway.admission.waiting == 1)
    fleet.directory.put(starting("prefill-0", "prefill"))
    await until(lambda: fleet.state("prefill-0") == "starting")
    await fleet.add("decode-0")
    await asyncio.sleep(0.2)
    assert not call.done()
    await fleet.add("prefill-0", Script())
    assert (await call).status_code == 200
    response = await fleet.chat(headers=mode)
    assert response.status_code == 200


async def test_a_role_that_nobody_starts_is_refused(make_fleet):
    fleet = await make_fleet({"decode-0": Script()}, starts_from_zero=True)
    response = await fleet.chat(headers={"x-baton-mode": "disaggregated"})
    assert response.status_code == 503
    assert "no prefill worker is ready" in response.json()["error"]["message"]


async def test_who_waits_may_go_away_or_run_out_of_time(make_fleet):
    fleet = await make_fleet({}, starts_from_zero=True)
    admission = fleet.lane.gateway.admission
    response = await fleet.chat(headers={"x-baton-timeout-ms": "200"})
    assert response.status_code == 504
    call = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: admission.waiting == 1)
    call.cancel()
    await until(lambda: admission.waiting == 0)
    assert fleet.lane.gateway.in_flight == 0
    assert fleet.lane.gateway.work.demand().waiting.count == 0


@pytest.mark.parametrize(("empty", "status"), [(True, 200), (False, 503)])
async def test_an_empty_fleet_is_healthy_only_if_it_may_be_empty(make_fleet, empty, status):
    """A load balancer must send the request that starts the first worker."""
    fleet = await make_fleet({}, starts_from_zero=empty)
    for path in ("/health", "/health/ready"):
        assert (await fleet.http.get(path)).status_code == status


async def test_a_model_that_is_asleep_waits_for_an_operator(make_fleet):
    fleet = await make_fleet({}, starts_from_zero=True)
    gateway = fleet.lane.gateway
    queued = asyncio.create_task(fleet.chat())
    await until(lambda: gateway.admission.waiting == 1)
    fleet.lane.planned(PlannedSizes(asleep="wait"))
    gateway.pump()
    later = await fleet.chat()
    assert [(await queued).status_code, later.status_code] == [503, 503]
    assert "an operator loads it" in later.json()["error"]["message"]
    assert (await fleet.http.get("/health")).status_code == 503
    fleet.lane.planned(PlannedSizes())
    woken = asyncio.create_task(fleet.chat())
    await until(lambda: gateway.admission.waiting == 1)
    await fleet.add("decode-0")
    assert (await woken).status_code == 200


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
async def test_a_sleep_ends_requests_or_lets_them_end(make_fleet, mode, reason):
    """As `finish_requests(None, FINISHED_ABORTED)` of vLLM's scheduler does."""
    fleet = await make_fleet({"decode-0": Script(step_s=0.02)})
    gateway = fleet.lane.gateway
    call = asyncio.create_task(fleet.chat(max_tokens=30))
    await until(lambda: any(a.record.completion_tokens > 2 for a in gateway.active.values()))
    for _ in range(2):
        fleet.lane.planned(PlannedSizes(asleep=mode))
    answer = (await call).json()
    assert answer["choices"][0]["finish_reason"] == reason
    assert (answer["usage"]["completion_tokens"] == 30) == (mode == "wait")
    assert (await fleet.chat()).status_code == 503
