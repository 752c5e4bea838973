"""The rate that a fleet holds, and what a fleet is asked and ordered."""

import httpx
import msgspec
import pytest

from loadtest.client.records import ServerOptions
from loadtest.client.server import ServerError
from loadtest.goodput.fleet import SizedFleet
from loadtest.goodput.measure import alone_s, held_rate, send_phases
from loadtest.goodput.phases import GoodLimits, LoadPhase, PhaseFigures, figures_of, good_over_time
from tests.loadtest.metrics.test_metrics import record
from tests.loadtest.tiny_server import Stream, tiny_server, words


def figures(rate: float, good: float) -> PhaseFigures:
    """Of 100 seconds."""
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
        records = await send_phases([phase], options, answer_tokens=3)
        with pytest.raises(ServerError, match="idle fleet failed: http_error slo_unreachable"):
            await alone_s(options)
    assert [found.retry_after for found in records] == ["7", "7"]
    found = figures_of(phase, records, GoodLimits(ttft_s=1.0, itl_s=1.0))
    assert (found.sent, found.good, found.refused, found.failed) == (2, 0, 2, 0)


async def test_the_prompts_of_two_runs_differ():
    bodies: list[str] = []

    async def reply(body: dict, stream: Stream) -> None:
        bodies.append(body["messages"][0]["content"])
        assert body["max_tokens"] == 3
        await words(body, stream)

    phase = LoadPhase(name="", rate=1.0, begin_s=0.0, end_s=0.1)
    with tiny_server(reply) as server:
        for _ in range(2):
            await send_phases([phase], ServerOptions(url=server.url, model="tiny"), 3)
    assert len(bodies[0].split()) == len(bodies[1].split()) == 1500
    assert bodies[0] != bodies[1]


def test_good_responses_over_time_count_when_they_were_to_be_sent():
    records = [record(index=i, intended_s=s, chunk_s=[s + 1.0]) for i, s in enumerate((1, 9, 11))]
    records.append(record(index=3, intended_s=12.0, chunk_s=[19.0]))
    records.append(record(index=4, intended_s=21.0, chunk_s=[22.0]))
    limits = GoodLimits(ttft_s=2.0, itl_s=1.0, own_s=0.5)
    assert good_over_time(records, limits, 20.0, 10.0) == [0.2, 0.1]
    slow = msgspec.structs.replace(limits, own_s=3.0)
    assert good_over_time(records, slow, 20.0, 10.0) == [0.2, 0.2], "twice its own time"


class Router:
    """Answers as a router does, and turns workers one question after an order."""

    def __init__(self) -> None:
        self.orders: list[dict] = []
        self.sizes = [{"prefill": 1, "decode": 3}]
        self.decisions = [
            {"at": 30.0, "decision": {"type": "nothing", "reason": "held"}, "done": False},
            {
                "at": 20.0,
                "decision": {
                    "type": "turn",
                    "worker_id": "worker-1",
                    "role": "prefill",
                    "reason": "1 + 3 misses",
                },
                "done": True,
            },
            {
                "at": 15.0,
                "decision": {"type": "resize", "prefill": 1, "decode": 3, "reason": "waits"},
                "done": True,
            },
            {
                "at": 5.0,
                "decision": {"type": "resize", "prefill": 9, "decode": 9, "reason": "old"},
                "done": True,
            },
        ]

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        if request.url.path == "/fleet/orders":
            self.orders.append(msgspec.json.decode(request.content))
            wanted = self.orders[-1]["arguments"]
            if wanted.get("prefill") == 9:
                return httpx.Response(400, json={"error": {"message": "no node has room"}})
            if "prefill" in wanted:
                self.sizes.append(wanted)
            return httpx.Response(200, json={"data": {}})
        if request.url.path == "/fleet/planner":
            slo = {"ttft_s": 2, "itl_s": 0.1}
            return httpx.Response(200, json={"slo": slo, "decisions": self.decisions})
        sizes = self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]
        workers = [{"role": role, "state": "ready"} for role in sizes for _ in range(sizes[role])]
        return httpx.Response(
            200, json={"workers": [*workers, {"role": "decode", "state": "dead"}]}
        )


def test_a_fleet_is_asked_and_ordered_as_an_operator_does():
    router = Router()
    fleet = SizedFleet("http://router", "key")
    fleet._http = httpx.Client(
        base_url="http://router",
        headers=fleet._http.headers,
        transport=httpx.MockTransport(router.answer),
    )
    with fleet:
        assert fleet.slo() == (2.0, 0.1)
        assert fleet.sizes() == {"prefill": 1, "decode": 3}, "a dead worker is not ready"
        assert fleet.decisions(since=10.0) == [
            (15.0, "1 + 3: waits"),
            (20.0, "worker-1 to prefill: 1 + 3 misses"),
        ]
        fleet.split(2, 2)
        assert fleet.sizes() == {"prefill": 2, "decode": 2}
        fleet.plan("auto")
        assert [order["arguments"] for order in router.orders] == [
            {"prefill": 2, "decode": 2},
            {"roles": "auto"},
        ]
        with pytest.raises(ServerError, match=r"400: .*no node has room"):
            fleet.split(9, 9)
        router.sizes = [{"prefill": 2, "decode": 2}, {"prefill": 2, "decode": 2}]
        with pytest.raises(ServerError, match=r"not 3 \+ 1 after 0 s"):
            fleet.split(3, 1, limit_s=0.0)
