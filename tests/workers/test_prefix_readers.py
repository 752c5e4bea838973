"""A prefix is pulled by whoever computes the prompt, and that may change. Real processes.

A router's word is for one reader: another prefill worker needs words of its own, and two readers of
one prefix must not get in each other's way.
"""

import asyncio
import signal

from batonpb import decode_pb2 as pb

from baton.wire.submission import prefix_request_id
from tests.workers.harness import prefix_source, routed, workers
from tests.workers.slow_link import behind_slow_link
from tests.workers.test_prefix_pull import BLOCK_TOKENS, BLOCKS, PROMPT, ask, outcomes, page_of


async def test_a_prefill_worker_that_replaces_another_pulls_with_words_of_its_own() -> None:
    """It had the words of the first one, was refused four times, and computed it all."""
    names = ("decode-0", "prefill-1", "prefill-2", "decode-9")
    async with workers(*names) as (decode, first, second, holder):
        async with routed(holder) as router:
            golden = await ask(router, "golden")
        first.signal_all(signal.SIGKILL)
        async with routed(decode) as router:
            await router.submit("x", PROMPT, first, prefix=(holder, BLOCKS))
            await router.until(lambda: router.asks)
            answer = pb.PrefillReplacement(
                request_id="x",
                attempt=1,
                prefill=second.target("x", decode.record),
                prefix=prefix_source(holder, BLOCKS, prefix_request_id("x", 0), second.record),
            )
            await router.send(replacement=answer)
            end = await router.ended("x")
            assert not end.HasField("error"), end.error.message
            assert router.tokens["x"][0] == golden
            assert await outcomes(second) == {"pulled": 1}
            assert end.times.computed_tokens == len(PROMPT) - BLOCKS * BLOCK_TOKENS
        assert "baton_pulls_refused_total{" not in await page_of(holder)


async def test_a_prefill_worker_that_got_no_words_asks_nobody() -> None:
    """So it is with a router of an older version."""
    names = ("decode-0", "prefill-1", "prefill-2", "decode-9")
    async with workers(*names) as (decode, first, second, holder):
        async with routed(holder) as router:
            golden = await ask(router, "golden")
        first.signal_all(signal.SIGKILL)
        async with routed(decode) as router:
            await router.submit("x", PROMPT, first, prefix=(holder, BLOCKS))
            await router.until(lambda: router.asks)
            target = second.target("x", decode.record)
            await router.send(
                replacement=pb.PrefillReplacement(request_id="x", attempt=1, prefill=target)
            )
            assert not (await router.ended("x")).HasField("error")
            assert router.tokens["x"][0] == golden
            assert await outcomes(second) == {}
        assert "baton_pulls_refused_total{" not in await page_of(holder)


async def test_two_readers_of_one_prefix_each_get_it() -> None:
    """Each engine counts its reservations from 1: the second took the first one's hand-off over."""
    names = ("decode-0", "decode-1", "decode-2")
    async with workers(*names, transports=("grpc",)) as (holder, slow, quick):
        async with routed(holder) as router:
            golden = await ask(router, "golden")
        async with routed(slow) as one, routed(quick) as other:
            direct = holder.record
            async with behind_slow_link(holder, 200e3) as link:
                await one.submit("x", PROMPT, prefix=(holder, BLOCKS))
                while link.passed_bytes < 16 * 1024:
                    await asyncio.sleep(0.01)
                holder.record = direct
                assert await ask(other, "x", prefix=(holder, BLOCKS)) == golden
                assert not one.ends, "the first pull was over before the second began"
                assert not (await one.ended("x")).HasField("error")
        assert one.tokens["x"][0] == golden
        for reader in (slow, quick):
            assert await outcomes(reader) == {"pulled": 1}
