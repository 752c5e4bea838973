"""Clients that leave at any moment, while workers fail: in the end nothing is left of them."""

import asyncio
import contextlib
import json
import random

import pytest

from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
CALLS = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "n": 3, "stream": True}),
    ("/v1/chat/completions", {**_CHAT, "guided_regex": "a+"}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True, "n": 2}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "logprobs": 2, "stop": ["x"]}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a"] * 20}),
    ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 40, "stream": True}),
    ("/v1/messages", {**_CHAT, "stream": True}),
]
FAULTS = [
    None,
    None,
    ("unavailable", "x", True),
    ("worker_lost", "x", True),
    ("transfer_failed", "x", True),
    ("internal_error", "x", False),
]


async def call_and_leave(port: int, chance: random.Random) -> None:
    await asyncio.sleep(chance.random() * 3)
    path, fields = chance.choice(CALLS)
    body = json.dumps({**fields, "priority": chance.choice((0, 0, 1))}).encode()
    timeout_ms = chance.choice((50, 300, 60_000))
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nx-baton-tenant: t{chance.randrange(4)}\r\n"
        f"x-baton-timeout-ms: {timeout_ms}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body[: chance.choice((10, *[len(body)] * 3))])
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(chance.choice((0.001, 0.01, 0.03, 0.1, 0.3, 2))):
            while await reader.read(chance.choice((10, 1000))) and chance.random() > 0.05:
                pass
    if chance.random() < 0.5:
        writer.transport.abort()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_stays_of_clients_that_leave(make_fleet, seed):
    chance = random.Random(seed)
    scripts = {f"decode-{n}": Script(step_s=0.002, prefill_s=0.01 * n) for n in range(3)}
    scripts["decode-2"].lose_end = seed == 2
    fleet = await make_fleet(
        {**scripts, "prefill-0": Script(step_s=0.002)}, max_queued_requests=40, window_requests=6
    )

    async def trouble() -> None:
        for _ in range(6):
            await asyncio.sleep(0.4)
            worker = chance.choice(list(fleet.workers.values()))
            worker.script.fail = chance.choice(FAULTS)
            worker.script.cut_stream_at, worker._cut = chance.choice((None, 5)), False
            worker.script.need_prefill = chance.random() < 0.3

    port = int(fleet.url.rpartition(":")[2])
    await asyncio.gather(trouble(), *(call_and_leave(port, chance) for _ in range(300)))
    gateway = fleet.lane.gateway
    await until(lambda: not gateway.active, 30)  # a worker has 10 s to confirm an end
    assert (gateway.admission.running, gateway.admission.waiting) == (0, 0)
    assert not gateway.admission._running_of and not gateway.admission._levels
    assert not gateway.book._workers_of
    kept = list(gateway.kept.newest_first())
    assert len(kept) > 50
    for active in kept:
        assert active.record.ended and active.observed
        assert active.request.prompt == ()
