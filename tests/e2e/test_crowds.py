"""Many requests at once, of which most leave, or whose prefill worker dies (rows 4, 7 and 8)."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from baton.engine.llm import LLM
from tests.e2e.fleet_processes import Fleet, chat, events, fleet, free_port, soon

pytestmark = pytest.mark.slow

CROWD = 50
ABORTED = 0.89
LIVE_WITHIN_S = 1.0
ROOM = {"max_batch_requests": 64, "kv_blocks": 1600}
FILLER = " ".join(f"item {number}" for number in range(60))


@pytest.fixture(scope="module")
def golden() -> list[str]:
    """What a single engine without a fleet says."""
    llm = LLM(kv_blocks=400, threads=1)
    return [llm.chat(asked(number)["messages"], max_tokens=12).text for number in range(CROWD)]


def asked(number: int) -> dict:
    return chat(f"Page {number}. Read this and go on: {FILLER}", max_tokens=12)


@contextlib.asynccontextmanager
async def crowd_of(running: Fleet) -> AsyncIterator[Callable[[int], Awaitable[str]]]:
    """Asks by number, of one client: to make fifty would hold this process up for a second."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:

        async def ask(number: int) -> str:
            body, text = {**asked(number), "stream": True}, ""
            headers = {"x-baton-mode": "disaggregated"}
            url = f"{running.url}/v1/chat/completions"
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for event in events(answer):
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
            return text

        yield ask


@contextlib.asynccontextmanager
async def live_throughout(running: Fleet) -> AsyncIterator[None]:
    """Meanwhile `/health/live` answers, soon, each time that it is asked."""
    over, slowest_s = asyncio.Event(), 0.0

    async def ask() -> None:
        nonlocal slowest_s
        async with httpx.AsyncClient(timeout=10) as client:
            while not over.is_set():
                began_s = time.monotonic()
                assert (await client.get(f"{running.url}/health/live")).status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                await asyncio.sleep(0.1)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        over.set()
        await asking
    assert slowest_s < LIVE_WITHIN_S


async def test_nine_of_ten_leave_and_the_others_notice_nothing(tmp_path, golden):
    """At a moment of their own, before, in and after prefill and hand-off."""
    moments = random.Random(11)
    with fleet(tmp_path, "prefill-0", "decode-0", queued=CROWD, **ROOM) as running:

        async def leave(number: int, after_s: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await ask(number)

        async with crowd_of(running) as ask, live_throughout(running):
            for _ in range(3):
                stay = moments.sample(range(CROWD), round(CROWD * (1 - ABORTED)))
                leaving = [
                    asyncio.create_task(leave(number, moments.uniform(0.05, 4.0)))
                    for number in range(CROWD)
                    if number not in stay
                ]
                staying = [asyncio.create_task(ask(number)) for number in stay]
                assert await asyncio.gather(*staying) == [golden[number] for number in stay]
                await asyncio.gather(*leaving)
        await asyncio.to_thread(running.assert_baseline)


async def test_fifty_pulls_outlive_their_peer_which_comes_back_on_its_two_ports(tmp_path, golden):
    """kill -9 of a prefill shell and engine in the middle; another life listens there at once.

    Where peers knew gRPC is gRPC again, or metrics by HTTP.
    """
    port = free_port()
    ports = f"{port}-{port + 1}"  # gRPC and metrics, each on either; and so no KV by TCP
    with fleet(tmp_path, "decode-0", queued=CROWD, **ROOM) as running:
        running.start_workers("prefill-0", ports=ports, **ROOM)
        running.start_workers("prefill-1", **ROOM)
        await soon(running.all_ready, 20)
        decode = running.workers["decode-0"]
        async with crowd_of(running) as ask, live_throughout(running):
            answers = [asyncio.create_task(ask(number)) for number in range(CROWD)]
            async with asyncio.timeout(30):
                while running.transfers()["count"] < 3:
                    await asyncio.sleep(0.05)
            assert not all(answer.done() for answer in answers)
            first = running.workers["prefill-0"]
            first.kill()
            first.process.stdout.close()
            await asyncio.to_thread(
                running.start_workers, "prefill-0", ports=ports, **ROOM | {"epoch": 2}
            )
            assert await asyncio.gather(*answers) == golden
        assert decode.process.poll() is None
        await asyncio.to_thread(running.assert_baseline)
