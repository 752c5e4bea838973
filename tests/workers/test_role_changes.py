"""A worker that changes its role: what waits goes elsewhere, what runs ends where it is."""

import asyncio

from batonpb import decode_pb2 as pb

from tests.telemetry.values import value_of
from tests.workers.harness import routed, worker_here, workers

PROMPTS = {
    name: list(range(begin, begin + 200)) for name, begin in (("a", 3), ("b", 303), ("c", 603))
}
# Each prompt takes 1.6 s, in steps of 0.2 s, and the next one waits.
SLOW = {"emulated_token_s": 0.008, "max_batch_requests": 1, "max_step_tokens": 25}


async def test_prompts_that_wait_are_asked_back_and_the_one_that_runs_is_not() -> None:
    async with (
        worker_here("prefill-0", **SLOW) as first,
        workers("prefill-1", "decode-0") as (second, decode),
        routed(decode) as router,
    ):
        for name, prompt in PROMPTS.items():
            await router.submit(name, prompt, first)
        while first._parts.engine.load.waiting < 2:
            await asyncio.sleep(0.01)
        await first.change_role("decode", 7)
        assert (first.record.role, first.record.turn) == ("decode", 7)
        await router.until(lambda: len(router.asks) == 2, 5.0)
        for ask in router.asks:
            assert ask.reason.code == "unavailable"
            assert not ask.peer_died
            target = second.target(ask.request_id, decode.record)
            await router.send(
                replacement=pb.PrefillReplacement(
                    request_id=ask.request_id, attempt=1, prefill=target
                )
            )
        for name in PROMPTS:
            end = await router.ended(name)
            assert not end.HasField("error"), end.error.message
        computed_by = sorted(route.prefill_worker_id for route in router.routes.values())
        assert computed_by == ["prefill-0", "prefill-1", "prefill-1"]
        assert value_of(first._parts.metrics, "baton_prefix_tokens", source="computed") == 200
        for name, prompt in PROMPTS.items():
            await router.submit(f"again {name}", prompt)
            await router.ended(f"again {name}")
            assert router.tokens[name] == router.tokens[f"again {name}"]
        await router.baseline()


async def test_a_worker_that_turns_to_prefill_keeps_its_streams() -> None:
    async with worker_here("decode-0", emulated_token_s=0.002) as decode, routed(decode) as router:
        await router.submit("a", PROMPTS["a"], sampling={"max_tokens": 100, "ignore_eos": True})
        await router.until(lambda: router.tokens["a"], 5.0)
        await decode.change_role("prefill", 1)
        end = await router.ended("a")
        assert not end.HasField("error")
        assert len(router.tokens["a"][0]) == 100
        await router.baseline()


async def test_prompts_that_come_after_the_turn_are_computed() -> None:
    """A router that does not know of the turn yet still sends some."""
    async with (
        worker_here("prefill-0") as first,
        workers("decode-0") as (decode,),
        routed(decode) as router,
    ):
        await first.change_role("decode", 1)
        await router.submit("a", PROMPTS["a"], first)
        end = await router.ended("a")
        assert not end.HasField("error")
        assert router.routes["a"].prefill_worker_id == "prefill-0"
