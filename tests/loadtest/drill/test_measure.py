"""The rate that a fleet holds, and what a fleet is asked."""

import httpx
import msgspec
import pytest

from loadtest.client.records import ServerOptions
from loadtest.client.server import ServerError
from loadtest.drill.fleet import DrillError, FleetView
from loadtest.drill.phases import GoodLimits, LoadPhase, PhaseFigures, figures_of
from loadtest.drill.runner import alone_s, held_rate, send_phases
from tests.loadtest.drill.test_verdict import worker
from tests.loadtest.metrics.test_metrics import record
from tests.loadtest.tiny_server import Stream, tiny_server, words


def figures(rate: float, good: float) -> PhaseFigures:
    """Return the figures of a phase of 100 seconds."""
    sent = round(100 * rate)
    served = round(100 * good)
    return PhaseFigures(
        name="", rate=rate, seconds=100.0, sent=sent, good=served, refused=0, late=0, failed=0
    )


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(5.0, [5.0]), (4.3, [5.0, 4.5]), (3.4, [5.0, 4.5, 4.0, 3.5]), (2.0, None)],
)
async def test_the_held_rate_is_the_first_from_above_that_is_served(capacity, expected):
    """Below its capacity the fleet serves all, above it what is left of it."""
    tried: list[float] = []

    async def measure(rate: float) -> PhaseFigures:
        tried.append(round(rate, 6))
        return figures(rate, min(rate, capacity))

    found = await held_rate(measure, figures(20.0, 5.0))
    if expected is None:
        assert found is None
        assert tried == [5.0, 4.5, 4.0, 3.5, 3.0]
    else:
        assert tried == expected
        assert found is not None
        assert found.rate == expected[-1]


async def test_a_rate_that_is_held_at_once_is_the_answer():
    async def never(rate: float) -> PhaseFigures:
        raise AssertionError(rate)

    held = figures(2.0, 1.95)
    assert await held_rate(never, held) is held
    assert await held_rate(never, figures(2.0, 0.0)) is None


async def test_a_refused_request_keeps_when_to_come_again():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head(429, "application/json", {"retry-after": "7"})
        await stream.raw(b'{"error": {"code": "slo_unreachable", "message": "busy"}}')

    phase = LoadPhase(name="", rate=4.0, begin_s=0.0, end_s=0.5)
    with tiny_server(reply) as server:
        options = ServerOptions(url=server.url, model="tiny")
        records = await send_phases([phase], options)
        with pytest.raises(ServerError, match="idle fleet failed: http_error slo_unreachable"):
            await alone_s(options)
    assert [found.retry_after for found in records] == ["7", "7"]
    found = figures_of(phase, records, GoodLimits(ttft_s=1.0, itl_s=1.0))
    assert (found.sent, found.good, found.refused, found.failed) == (2, 0, 2, 0)


async def test_the_prompts_of_two_runs_differ():
    bodies: list[str] = []

    async def reply(body: dict, stream: Stream) -> None:
        bodies.append(body["messages"][0]["content"])
        await words(body, stream)

    phase = LoadPhase(name="", rate=1.0, begin_s=0.0, end_s=0.1)
    with tiny_server(reply) as server:
        for _ in range(2):
            await send_phases([phase], ServerOptions(url=server.url, model="tiny"))
    assert len(bodies[0].split()) == len(bodies[1].split()) == 1500
    assert bodies[0] != bodies[1]


def test_a_good_response_may_need_twice_its_own_time_more():
    records = [record(index=i, intended_s=s, chunk_s=[s + 1.0]) for i, s in enumerate((1, 9, 11))]
    records.append(record(index=3, intended_s=12.0, chunk_s=[19.0]))
    records.append(record(index=4, intended_s=21.0, chunk_s=[22.0]))
    phase = LoadPhase(name="", rate=0.2, begin_s=0.0, end_s=20.0)
    limits = GoodLimits(ttft_s=2.0, itl_s=1.0, own_s=0.5)
    assert figures_of(phase, records, limits).good == 3
    slow = msgspec.structs.replace(limits, own_s=3.0)
    assert figures_of(phase, records, slow).good == 4


async def test_the_router_names_its_limits_and_its_workers():
    given: dict[str, object] = {"/fleet/planner": {"slo": {"ttft_s": 2, "itl_s": 0.1}}}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        return httpx.Response(200, json=given[request.url.path])

    fleet = FleetView("http://router", "key")
    fleet._http = httpx.AsyncClient(
        base_url="http://router",
        headers=fleet._http.headers,
        transport=httpx.MockTransport(answer),
    )
    async with fleet:
        assert await fleet.slo() == (2.0, 0.1)
        given["/fleet/planner"] = {"slo": None}
        assert await fleet.slo() is None
        given["/fleet"] = {"workers": [msgspec.structs.asdict(worker())]}
        assert await fleet.workers() == [worker()]
        given["/fleet"] = {"detail": "no such page"}
        with pytest.raises(DrillError, match="/fleet: Expected `array`, got `null`"):
            await fleet.workers()
