"""A real worker keeps the order it is given, and lets go of what is cancelled within a step."""

import asyncio

from batonpb import decode_pb2 as pb

from tests.workers.harness import routed, workers

STEP_S = 0.02


async def test_the_urgent_overtakes_who_waits_and_a_cancel_takes_one_step():
    slow = {"emulated_token_s": STEP_S, "max_batch_requests": 1}
    async with workers("decode-0", **slow) as (decode,), routed(decode) as router:
        ended: list[str] = []
        await router.submit("running", [1, 2], sampling={"max_tokens": 400})
        await router.until(lambda: router.tokens["running"])
        for name, priority in (("first", 0), ("second", 0), ("urgent", -1)):
            await router.submit(name, [3, 4], priority=priority, sampling={"max_tokens": 2})

        async def note(name: str) -> None:
            await router.ended(name)
            ended.append(name)

        notes = [asyncio.create_task(note(name)) for name in ("first", "second", "urgent")]
        await asyncio.sleep(2 * STEP_S)
        seen = len(router.tokens["running"][0])
        began_s = asyncio.get_running_loop().time()
        await router.send(cancel=pb.Cancel(request_id="running", attempt=1))
        end = await router.ended("running")
        took_s = asyncio.get_running_loop().time() - began_s
        assert end.error.code == "cancelled"
        assert len(router.tokens["running"][0]) - seen <= 2, "at most the step under way"
        assert took_s < 25 * STEP_S  # a busy machine; it could be one step
        await asyncio.gather(*notes)
        assert ended == ["urgent", "first", "second"]
        await router.baseline()
