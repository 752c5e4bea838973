"""A fork of 43 agents over 20,000 tokens, through two routers in turn: real processes and Redis.

The workers are emulated: prompts of that length take minutes on two cores.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Iterator, Sequence

import httpx
import pytest

from tests.e2e.fleet_processes import Fleet, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIBLINGS = 43
OWN_TOKENS = 40  # more than those of its message
TIMING = "h100-70b"
CONTEXT = 32_768
WORKERS = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(4)]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("forks"))
    model = {
        "timing": TIMING,
        "vocab_size": 49_152,
        "eos_token_ids": [2],
        "max_context_tokens": CONTEXT,
    }
    settings = {"max_context_tokens": CONTEXT, "kv_blocks": 16_384, "check_every_step": False}
    also = f"pools: {{engine: {{emulated: {TIMING}}}}}\nmax_batch_requests: 64\n"
    try:
        fleet.start(*WORKERS, queued=256, also=also, emulated=model, **settings)
        fleet.start_router()
        yield fleet
    finally:
        fleet.stop()


def text(name: str, words: int = 4800) -> str:
    draw = random.Random(name)
    return " ".join(f"{draw.choice('abcdefgh')}word{draw.randrange(1000)}" for _ in range(words))


async def ask(client: httpx.AsyncClient, url: str, system: str, number: int) -> float:
    """The share of the prompt before the own message that was cached."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Task {number}"},
    ]
    more = {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "smollm2", "messages": messages, **more}
    usage = None
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for event in events(response):
            usage = event.get("usage") or usage
    assert usage["prompt_tokens"] > 19_000
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return min(cached / (usage["prompt_tokens"] - OWN_TOKENS), 1.0)


async def fork(urls: Sequence[str], name: str, *also: Awaitable) -> list[float | BaseException]:
    """Send all siblings within 50 ms, to the routers in turn; return the results of `ask`."""
    system = text(name)
    limits = httpx.Limits(max_connections=2 * SIBLINGS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def later(number: int) -> float:
            await asyncio.sleep(number * 0.05 / SIBLINGS)
            return await ask(client, urls[number % len(urls)], system, number)

        calls = (later(number) for number in range(SIBLINGS))
        found = await asyncio.gather(*calls, *also, return_exceptions=True)
        return found[:SIBLINGS]


def assert_computed_once(shares: Sequence[float]) -> None:
    assert sum(share < 0.5 for share in shares) == 1, sorted(shares)[:3]
    assert (sum(shares) - min(shares)) / (len(shares) - 1) >= 0.97


async def test_a_fork_at_two_routers_is_computed_once(running: Fleet) -> None:
    urls = [url for _, url in running.routers]
    for name in "abc":
        assert_computed_once(await fork(urls, name))


async def test_redis_that_hangs_during_a_fork_fails_no_request(running: Fleet) -> None:
    urls = [url for _, url in running.routers]

    async def hang() -> None:
        await asyncio.sleep(0.5)
        os.kill(running.redis.pid, signal.SIGSTOP)

    try:
        shares = await fork(urls, "hang", hang())
        assert all(isinstance(share, float) for share in shares), shares
        assert all(isinstance(share, float) for share in await fork(urls, "still"))
    finally:
        os.kill(running.redis.pid, signal.SIGCONT)


async def test_a_router_that_dies_costs_the_siblings_of_others_nothing(running: Fleet) -> None:
    """Two routers that share, and the one with the first sibling is killed."""
    urls = [running.start_router(), running.url]
    process = running.routers[-1][0]

    async def kill() -> None:
        await asyncio.sleep(0.8)
        process.kill()

    with contextlib.closing(kill()) as killed:
        shares = await fork(urls, "dies", killed)
    others = shares[1::2]
    assert all(isinstance(share, float) for share in others), others
    assert sum(share < 0.5 for share in others) <= 1
