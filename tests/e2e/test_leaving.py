"""A client that leaves, at each of nine points of its request: prefill is free again (row 3)."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import pytest

from baton.engine.core.core import LONE_CHUNK_TIME_NS
from tests.e2e.fleet_processes import (
    Fleet,
    chat,
    events,
    fleet,
    samples,
    soon,
    streaming,
    total,
)

pytestmark = pytest.mark.slow

FREE_WITHIN_S = 1.0
CHUNK_S = 2 * LONE_CHUNK_TIME_NS / 1e9  # its time is learnt from others: it may last longer
WINDOW = 2 * 2  # sequences that the router lets run on two workers
FILLER = " ".join(f"item {number}" for number in range(200))
PROMPT_TOKENS = 900  # it has some more: half a second of prefill, or two
MAX_TOKENS = 400
KV_BLOCKS = 400  # for two prompts of three times that, not for three

Leave = Callable[[], Awaitable[None]]
Point = Callable[[Fleet], AbstractAsyncContextManager[Leave]]


class Client:
    """One streamed answer to what no cache knows, until its reader leaves."""

    def __init__(self, running: Fleet, text: str = FILLER, **fields: object) -> None:
        self.events = 0
        self._reading = asyncio.create_task(self._read(running.url, asked(text, **fields)))

    async def _read(self, url: str, body: dict) -> None:
        async with streaming(url, body, "disaggregated") as answer:
            assert answer.status_code == 200, await answer.aread()
            async for event in events(answer):
                assert "error" not in event, event
                self.events += 1

    async def until(self, reached: Callable[[], bool]) -> None:
        """Read on; what ends the answer before that ends the test."""
        waiting = asyncio.create_task(soon(reached, 30))
        try:
            await asyncio.wait({waiting, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done():
                self._reading.result()
                raise AssertionError("it was answered before it could leave")
            await waiting
        except BaseException:
            waiting.cancel()
            await self.end()
            raise

    async def leave(self) -> None:
        assert not self._reading.done(), "it was answered before it could leave"
        await self.end()

    async def end(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, AssertionError):
            await self._reading


@asynccontextmanager
async def crowd(*clients: Client) -> AsyncIterator[None]:
    """Others, whose answers are being written meanwhile."""
    try:
        for client in clients:
            await client.until(lambda client=client: client.events > 0)
        yield
    finally:
        for client in clients:
            await client.end()


def asked(text: str, **fields: object) -> dict[str, object]:
    text = f"At {time.monotonic_ns()}: {text}"
    return chat(text, **{"max_tokens": MAX_TOKENS, "ignore_eos": True, **fields})


def shown(running: Fleet, worker: str = "prefill-0") -> Counter[str]:
    """What a worker says itself: nothing here waits for its reports to the router."""
    return Counter(samples(f"http://{running.workers[worker].record.metrics_address}"))


def leased(running: Fleet, worker: str = "prefill-0") -> float:
    return shown(running, worker)['baton_kv_blocks{state="leased"}']


def computed_tokens(running: Fleet) -> float:
    return shown(running)['baton_batch_tokens_sum{kind="prefill"}']


@contextlib.contextmanager
def standing(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def in_its_body(running: Fleet) -> AsyncIterator[Leave]:
    address = urlsplit(running.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f'{head}content-length: 100000\r\n\r\n{{"model": '.encode())
    await writer.drain()
    await asyncio.sleep(0.2)

    async def leave() -> None:
        writer.close()
        await writer.wait_closed()

    yield leave


@asynccontextmanager
async def queued_at_the_router(running: Fleet) -> AsyncIterator[Leave]:
    pairs = [Client(running, "Hi", n=WINDOW // 2, max_tokens=2000) for _ in range(2)]
    async with crowd(*pairs):
        client = Client(running)
        await client.until(lambda: total(samples(running.url), "baton_queue_requests") == 1)
        yield client.leave


@asynccontextmanager
async def before_decode_admits(running: Fleet) -> AsyncIterator[Leave]:
    """Its pages are taken, and nobody prefills what has no place to go."""
    async with crowd(*(Client(running, 3 * FILLER, max_tokens=1000) for _ in range(2))):
        client = Client(running, 3 * FILLER)
        await client.until(lambda: shown(running, "decode-0")["baton_waiting_requests"] > 0)
        await client.until(lambda: leased(running) == 0)
        yield client.leave


@asynccontextmanager
async def in_prefill(running: Fleet) -> AsyncIterator[Leave]:
    client = Client(running, 3 * FILLER)
    await client.until(lambda: leased(running) > 0)
    yield client.leave


@asynccontextmanager
async def in_prefill_while_decode_stands(running: Fleet) -> AsyncIterator[Leave]:
    """The decode worker's engine does not answer its shell."""
    async with in_prefill(running) as leave:
        with standing(running.workers["decode-0"].record.pid):
            yield leave


@asynccontextmanager
async def in_hand_off(running: Fleet) -> AsyncIterator[Leave]:
    """The decode worker's shell takes no KV until its router has told it that the client left."""
    began_tokens = computed_tokens(running)
    client = Client(running)
    await client.until(lambda: leased(running) > 0 and leased(running, "decode-0") > 0)
    with contextlib.ExitStack() as stands:
        stands.enter_context(standing(running.workers["decode-0"].process.pid))
        await client.until(lambda: computed_tokens(running) - began_tokens > PROMPT_TOKENS)
        assert leased(running) > 0, "it waits to be taken"

        async def leave() -> None:
            await client.leave()
            await asyncio.sleep(0.1)
            stands.close()

        yield leave


@asynccontextmanager
async def at_its_first_token(running: Fleet) -> AsyncIterator[Leave]:
    client = Client(running)
    await client.until(lambda: client.events > 0)
    yield client.leave


@asynccontextmanager
async def in_its_answer(running: Fleet) -> AsyncIterator[Leave]:
    client = Client(running)
    await client.until(lambda: client.events > 30)
    yield client.leave


POINTS = {  # and what prefill computes meanwhile is told when it is done
    in_its_body: 0.0,
    queued_at_the_router: 0.0,
    before_decode_admits: 0.0,
    in_prefill: CHUNK_S,
    in_prefill_while_decode_stands: CHUNK_S,
    in_hand_off: 0.0,
    at_its_first_token: 0.0,
    in_its_answer: 0.0,
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    also = f"max_batch_requests: {WINDOW // 2}\n"
    both = ("prefill-0", "decode-0")
    with fleet(folder, *both, also=also, kv_blocks=KV_BLOCKS) as made:
        yield made


@pytest.fixture
async def running(started: Fleet) -> Fleet:
    """Whole again: a worker that stood still is not ready at once."""
    await soon(started.all_ready, 20)
    return started


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
async def test_prefill_is_free_again_within_a_second(running: Fleet, point: Point) -> None:
    began_tokens = computed_tokens(running)
    async with point(running) as leave:
        left_s = time.monotonic()
        await leave()
        await soon(lambda: leased(running) == 0)
        assert time.monotonic() - left_s < FREE_WITHIN_S + POINTS[point]
    await asyncio.to_thread(running.assert_baseline)
    if point in (in_its_body, queued_at_the_router):
        assert computed_tokens(running) - began_tokens < PROMPT_TOKENS, "for nobody"
    if point is before_decode_admits:
        assert computed_tokens(running) - began_tokens < 7 * PROMPT_TOKENS, "for nobody"


async def test_who_is_second_at_prefill_and_leaves_is_not_computed(running: Fleet) -> None:
    """The ninth: it waits, or has what a step leaves of its budget, a block at a time."""

    def second() -> bool:
        page = shown(running)
        return page["baton_running_requests"] + page["baton_waiting_requests"] == 2

    began_tokens = computed_tokens(running)
    first = Client(running, 3 * FILLER)
    await first.until(lambda: leased(running) > 0)
    client = Client(running)
    try:
        await client.until(second)
        await client.leave()
        await first.until(lambda: first.events > 0)
    finally:
        await first.end()
    await asyncio.to_thread(running.assert_baseline)
    assert computed_tokens(running) - began_tokens < 3.5 * PROMPT_TOKENS
