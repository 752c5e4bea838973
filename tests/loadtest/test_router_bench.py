"""The bench of the router: its clients read streams right, and all of it runs."""

import asyncio
import contextlib
import json
import time

import pytest

from benchmarks.router.__main__ import Demand, Figures, Shape, baton, measure, median
from benchmarks.router.load import Client, Load, run
from tests.house.imports import ROOT

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b"9\r\ndata: a\n\n\r\n10\r\ndata: b\n\ndata: c\n\n\r\n0\r\n\r\n"


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def client() -> tuple[Client, Load, Wire]:
    load, wire = Load("m", words=5, answer_tokens=3), Wire()
    made = Client(load, lambda free: free.ask(time.perf_counter()))
    made.connection_made(wire)
    return made, load, wire


@pytest.mark.parametrize("cut", range(1, len(BODY)))
def test_a_client_asks_again_at_the_end_of_a_stream_however_it_is_cut(cut):
    made, load, wire = client()
    made.data_received(HEAD)
    made.data_received(BODY[:cut])
    if cut < len(BODY):
        assert (load.requests, len(wire.written)) == (0, 1)
    made.data_received(BODY[cut:])
    assert (load.requests, len(wire.written)) == (1, 2)
    assert len(load.ttft_s) == 1
    assert not load.failures


def test_no_two_prompts_are_alike_and_each_has_its_words():
    _, load, wire = client()
    made = [json.loads(load.request().partition(b"\r\n\r\n")[2]) for _ in range(3)]
    prompts = [body["messages"][0]["content"] for body in made]
    assert {len(prompt.split()) for prompt in prompts} == {5}
    assert len({prompt.split()[0] for prompt in prompts}) == 3
    assert json.loads(wire.written[0].partition(b"\r\n\r\n")[2])["max_tokens"] == 3


def test_a_refusal_is_a_failure_and_not_asked_again():
    made, load, wire = client()
    made.data_received(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    assert load.requests == 0
    assert "429" in load.failures[0]
    assert wire.closed


async def test_requests_at_a_rate_wait_from_their_own_moment_however_slow_answers_are():
    served: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.rpartition(b"content-length: ")[2]))
                await asyncio.sleep(0.2)
                writer.write(HEAD + BODY)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    load = Load("m", words=5, answer_tokens=3)
    seen = await run(load, port, clients=0, rate_per_s=100.0, warm_s=0.3, seconds=1.0)
    server.close()
    await asyncio.gather(*served)
    assert seen.failed == 0
    assert 50 < seen.requests < 150, "one connection would have brought 5"
    assert len(served) >= 100 * 0.2
    assert seen.ttft_p50_s >= 0.2


def test_medians_are_of_each_number_alone():
    def figures(rate: float, gap: float) -> Figures:
        zeros = dict.fromkeys(
            (
                *("requests_per_s", "tokens_per_s", "requests_per_cpu_s", "router_cores"),
                *("events_per_request", "ttft_p50_s", "ttft_p99_s", "gap_p50_s", "stream_bytes"),
            ),
            0.0,
        )
        rest = {"side": "a", "load": "b", "demand": "1", "failed": 0, "limit": ""}
        return Figures(**zeros, **rest, tokens_per_cpu_s=rate, gap_p99_s=gap)

    middle = median([figures(1.0, 9.0), figures(2.0, 7.0), figures(3.0, 8.0)])
    assert (middle.tokens_per_cpu_s, middle.gap_p99_s) == (2, 8)


@pytest.mark.slow
def test_a_router_is_measured():
    with baton(ROOT, 2, 0.01, 1) as side:
        figures = measure("baton", side, Shape(20, 16), Demand(clients=4), seconds=2)
        slow = measure("baton", side, Shape(20, 16), Demand(rate_per_s=10), seconds=4)
    assert slow.failed == 0
    assert 3 < slow.requests_per_s < 20
    assert figures.failed == 0
    assert figures.requests_per_s > 0
    assert figures.tokens_per_cpu_s > figures.requests_per_cpu_s > 0
    assert 2 < figures.events_per_request < 25
