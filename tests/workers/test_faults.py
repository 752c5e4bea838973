"""Faults of a decode worker's own, a step loop that stands still, and prefill workers that die."""

import asyncio
import math
import os
import signal

import pytest
from batonpb import decode_pb2 as pb

from decode_worker import service
from decode_worker.parts import WorkerParts
from kvtransfer import receiver
from kvtransfer.kv_slice import cut
from kvtransfer.lent_pages import LentFrame
from tests.workers.harness import WorkerProcess, routed, worker_here, workers

PROMPT = list(range(3, 203))


@pytest.mark.parametrize("faults", [1, 1000])
async def test_a_fault_while_a_frame_is_stored_leaves_no_page_behind(
    monkeypatch: pytest.MonkeyPatch, faults: int
) -> None:
    """Defect 7: repaired, or given up with a typed reason; in both cases all pages come free."""
    store, left = LentFrame.store, faults

    def faulty(self, *arguments) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise IndexError("by design")
        store(self, *arguments)

    monkeypatch.setattr(LentFrame, "store", faulty)
    async with workers("prefill-0") as (prefill,), worker_here("decode-0") as decode:
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill)
            await router.until(lambda: router.asks or "a" in router.ends)
            if faults > 1:
                assert not router.asks[0].peer_died
                assert "damaged" in router.asks[0].reason.message
                local = pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
                await router.send(replacement=local)
            end = await router.ended("a")
            assert not end.HasField("error")
            if faults == 1:
                assert end.times.repaired_chunks == 1
            await router.baseline()
            assert router.status.kv_blocks.free + router.status.kv_blocks.cached == 128


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_a_malformed_submission_is_refused_alone(disaggregated: bool) -> None:
    """Each of these ended the step loop, and with it every request of the worker."""
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        target = prefill if disaggregated else None
        await router.submit("ragged", PROMPT, target, prompt_tokens=b"abc")
        await router.submit("none", PROMPT, target, sampling={"n": 0})
        await router.submit("prompt", [5, 2**31], target)
        await router.submit("stop", PROMPT, target, sampling={"stop_token_ids": [2**31]})
        bias = {"logit_bias": [{"token_id": 2**31, "bias": 1.0}]}
        await router.submit("bias", PROMPT, target, sampling=bias)
        await router.submit("words", PROMPT, target, sampling={"bad_words": [b"\xff" * 4]})
        await router.submit("resumed", PROMPT, target, emitted=[[2**31]])
        wrong = {
            "many": {"sampling": {"n": 2**31}},
            "scored": {"sampling": {"prompt_logprobs": -(2**31)}},
            "alternatives": {"sampling": {"logprobs": 2**31 - 1}},
            "share": {"kv_share": math.nan},
            "seed": {"hash_seed": b"abc"},
            "lease": {"lease_ms": 2**32 - 1},
        }
        for name, fields in wrong.items():
            await router.submit(name, PROMPT, target, **fields)
        for name in ("ragged", "none", "prompt", "stop", "bias", "words", "resumed", *wrong):
            assert (await router.ended(name)).error.code == "invalid_request"
        await router.submit("good", PROMPT, prefill)
        assert not (await router.ended("good")).HasField("error")


async def test_a_fault_while_a_submission_is_taken_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit, failures = service.DecodeRequest.start, []

    def faulty(self) -> None:
        if self.submission.request_id == "bad":
            raise RuntimeError("by design")
        submit(self)

    monkeypatch.setattr(service.DecodeRequest, "start", faulty)
    monkeypatch.setattr(WorkerParts, "count_task_failure", lambda _, task: failures.append(task))
    async with worker_here("decode-0") as decode, routed(decode) as router:
        await router.submit("bad", PROMPT)
        await router.submit("good", PROMPT)
        assert (await router.ended("bad")).error.code == "internal_error"
        assert not (await router.ended("good")).HasField("error")
        assert failures == ["submit"]
        assert not router.lost


async def test_no_router_makes_a_worker_ready_that_leaves() -> None:
    """``Drain(on=False)`` undid the worker's own drain, and requests came to be killed."""
    async with worker_here("decode-0") as decode, routed(decode) as router:
        assert await decode.drain()
        await router.send(drain=pb.Drain(on=False))
        await router.submit("a", PROMPT)
        assert (await router.ended("a")).error.code == "unavailable"


async def test_prefill_shells_that_are_killed_with_pulls_in_flight_are_told_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Defect 1: two of five were told as alive, and did not count for the query of death."""
    monkeypatch.setattr(receiver, "cut", lambda *slice_of: cut(*slice_of[:2], frame_bytes=1 << 12))
    names = [f"prefill-{number}" for number in range(5)]
    slow = "tests.workers.slow_prefill"
    prefills = await asyncio.gather(*(WorkerProcess.start(name, slow) for name in names))
    try:
        async with worker_here("decode-0") as decode, routed(decode) as router:
            await router.submit("a", PROMPT, prefills[0])
            for number, prefill in enumerate(prefills):
                await asyncio.sleep(0.15 + 0.06 * number)
                assert "a" not in router.ends, "too fast: nothing was in flight"
                prefill.process.kill()
                await router.until(lambda: router.asks, 5.0)
                ask = router.asks.pop()
                assert ask.failed.worker_id == prefill.record.worker_id
                assert ask.peer_died, ask.reason.message
                answer = pb.PrefillReplacement(request_id="a", attempt=1)
                if number + 1 < len(prefills):
                    target = prefills[number + 1].target("a", decode.record)
                    answer.prefill.CopyFrom(target)
                else:
                    answer.compute_locally = True
                await router.send(replacement=answer)
            assert not (await router.ended("a")).HasField("error")
            await router.baseline()
    finally:
        await asyncio.gather(*(prefill.stop() for prefill in prefills))


async def test_a_step_loop_that_stands_still_is_not_ready() -> None:
    """Defect 23: it was placed on for as long as a probe may take."""
    async with workers("prefill-0", "decode-0", probe_s=60.0) as (prefill, decode):
        async with routed(decode) as router:
            await asyncio.sleep(1.2)  # idle for longer than between two signs of life
            assert router.status.state == "ready"
            for worker in (prefill, decode):
                os.kill(worker.record.pid, signal.SIGSTOP)
            # After 3 s of silence; they count anew when the whole host stood still for one.
            await router.until(lambda: router.status.state == "draining", 9.0)
            await router.submit("a", [1, 2, 3])
            assert (await router.ended("a", 3.0)).error.code == "unavailable"
            os.kill(decode.record.pid, signal.SIGCONT)
            await router.until(lambda: router.status.state == "ready", 4.0)
            await router.submit("b", [1, 2, 3], prefill)
            await router.until(lambda: router.asks, 6.0)
            assert "does not respond" in router.asks[0].reason.message
            assert not router.asks[0].peer_died
            local = pb.PrefillReplacement(request_id="b", attempt=1, compute_locally=True)
            await router.send(replacement=local)
            assert not (await router.ended("b")).HasField("error")


async def test_a_busy_step_loop_is_ready() -> None:
    """Defect 23: steps are signs of life too, and a step is shorter than the limit."""
    async with workers("decode-0", emulated_token_s=0.05) as (decode,), routed(decode) as router:
        await router.submit("a", [1, 2, 3], sampling={"max_tokens": 100})
        await router.until(lambda: router.tokens["a"])
        states = set()

        def ended() -> bool:
            states.add(router.status.state)
            return "a" in router.ends

        await router.until(ended, 15.0)
        assert states == {"ready"}


@pytest.mark.slow
async def test_a_worker_that_stood_still_does_not_blame_its_router_for_that_time():
    """What the router sent meanwhile lies unread when the worker looks at its leases."""
    async with workers("decode-0", emulated_token_s=0.02) as (decode,), routed(decode) as router:
        for number in range(6):
            await router.submit(f"r{number}", [3 + number] * 40, sampling={"max_tokens": 60})
        await router.until(lambda: router.tokens["r5"])
        for _ in range(2):
            os.kill(decode.process.pid, signal.SIGSTOP)
            await asyncio.sleep(1.9)  # the lease is 1.5 s
            os.kill(decode.process.pid, signal.SIGCONT)
            await asyncio.sleep(0.4)
        for number in range(6):
            end = await router.ended(f"r{number}", 60)
            assert not end.HasField("error"), end.error.message
