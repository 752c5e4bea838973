"""An answer began at a worker that is gone; another one goes on with it. Real processes."""

import asyncio

import pytest

from tests.workers.harness import routed, workers

PROMPT = list(range(3, 203))
SAMPLING = {"n": 2, "temperature": 1.0, "seed": 9, "max_tokens": 40}


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_the_rest_is_what_the_first_worker_would_have_said(mode):
    async with workers("prefill-0", "decode-0", "decode-1") as (prefill, first, second):
        source = prefill if mode == "disaggregated" else None
        async with routed(first) as router:
            await router.submit("whole", PROMPT, source, sampling=SAMPLING)
            await router.ended("whole")
            whole = router.tokens["whole"]
        async with routed(second) as router:
            for cut in (1, 16, 39):
                name, emitted = f"cut {cut}", [whole[choice][:cut] for choice in (0, 1)]
                await router.submit(name, PROMPT, source, sampling=SAMPLING, emitted=emitted)
                end = await router.ended(name)
                assert not end.HasField("error"), end.error.message
                assert router.tokens[name] == whole
                assert router.routes[name].mode == mode
                assert router.repeats == 0, "nothing that was emitted is said again"
                assert end.times.computed_tokens <= len(PROMPT)
            await router.baseline()


async def test_a_stream_that_breaks_after_the_move_is_resumed():
    async with workers("decode-0", "decode-1", emulated_token_s=0.004) as (first, second):
        async with routed(first) as router:
            await router.submit("whole", PROMPT, sampling=SAMPLING)
            await router.ended("whole")
            whole = router.tokens["whole"]
        async with routed(second, "r") as router:
            emitted = [whole[choice][:5] for choice in (0, 1)]
            await router.submit("r", PROMPT, sampling=SAMPLING, emitted=emitted)
            await router.until(lambda: len(router.tokens["r"][0]) > 8)
            await router.drop_stream()
            await asyncio.sleep(0.3)
            end = await router.resume("r")
            assert not end.HasField("error"), end.error.message
            assert router.tokens["r"] == whole


async def test_what_cannot_go_on_ends_alone():
    async with workers("decode-0") as (decode,), routed(decode) as router:
        for emitted in ([[]], [[5] * 8], [[5], [6]]):
            await router.submit(f"{emitted}", PROMPT, emitted=emitted)
            end = await router.ended(f"{emitted}")
            assert end.error.code == "invalid_request", end.error
        await router.submit("well", PROMPT)
        assert not (await router.ended("well")).HasField("error")
        await router.baseline()
