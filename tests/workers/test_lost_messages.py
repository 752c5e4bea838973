"""Words between a router and a decode worker that are lost, or overtake each other."""

import asyncio

import pytest
from batonpb import common_pb2
from batonpb import decode_pb2 as pb

from baton.types.errors import CancelledError_
from baton.wire.tokens import pack_tokens
from decode_worker.parts import WorkerParts
from decode_worker.service import MAX_TOMBSTONES, TOMBSTONE_NS, DecodeService, Tombstones
from tests.workers.harness import MiniRouter, routed, worker_here, workers

PROMPT = list(range(3, 203))


def submission(name: str, attempt: int = 1) -> pb.Submission:
    sampling = common_pb2.SamplingParams(
        max_tokens=100, n=1, top_p=1, repetition_penalty=1, logprobs=-1
    )
    return pb.Submission(
        request_id=name,
        attempt=attempt,
        prompt_tokens=pack_tokens(PROMPT),
        sampling=sampling,
        hash_seed=b"s" * 16,
        router_id="router",
        lease_ms=1500,
    )


async def test_an_ask_that_was_lost_with_its_stream_comes_again() -> None:
    """Defect 4: neither PrefillNeeded nor its answer survives a broken stream."""
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        prefill.process.kill()
        await prefill.process.wait()
        await router.submit("a", PROMPT, prefill)
        await router.until(lambda: router.asks)
        await router.drop_stream()  # the answer would have gone this way
        router.asks.clear()
        await router.connect()
        await router.send(resume=pb.Resume(request_id="a", attempt=1, next_index=[0]))
        await router.until(lambda: router.asks, 4.0)
        assert router.asks[0].failed.worker_id == "prefill-0"
        assert router.asks[0].peer_died
        assert router.status.transfers.failures == 1, "one failure, however often it is told"
        local = pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
        await router.send(replacement=local)
        await router.send(replacement=local)  # both asks were answered
        assert not (await router.ended("a")).HasField("error")
        await router.baseline()


async def test_a_submission_that_its_cancel_has_overtaken_does_not_run() -> None:
    """Defect 6: long prompts have a call of their own; the lease is the router's, not theirs."""
    async with workers("decode-0", emulated_token_s=0.02) as (decode,), routed(decode) as router:
        await router.send(cancel=pb.Cancel(request_id="a", attempt=1))
        await router.send(cancel=pb.Cancel(request_id="b", attempt=1, choices=[0]))
        await asyncio.sleep(0.2)
        await router.submit_alone(submission("a"))
        end = await router.ended("a", 4.0)
        assert end.error.code == "cancelled"
        await router.baseline(3.0)
        await router.submit_alone(submission("a", attempt=2))
        await router.submit_alone(submission("b"))  # only a choice of it had ended
        await router.until(lambda: router.tokens.get("a") and router.tokens.get("b"))


async def test_a_submission_that_its_resume_has_overtaken_does_not_run() -> None:
    """Defect 6: the router was told "not held", and has placed it elsewhere."""
    async with workers("decode-0", emulated_token_s=0.02) as (decode,), routed(decode) as router:
        await router.send(resume=pb.Resume(request_id="a", attempt=1, next_index=[0]))
        assert (await router.ended("a", 2.0)).error.code == "unavailable"
        router.ends.clear()
        await router.submit_alone(submission("a"))
        end = await router.ended("a", 4.0)
        assert end.error.code == "unavailable"
        assert not router.tokens
        await router.baseline(3.0)


def test_tombstones_are_bounded_in_number_and_time() -> None:
    """Defect 6."""
    graves = Tombstones()
    for number in range(MAX_TOMBSTONES + 10):
        graves.add((f"r{number}", 1), CancelledError_("cancelled"), number)
    last = (f"r{MAX_TOMBSTONES + 9}", 1)
    assert graves.find(("r9", 1)) is None
    assert graves.find(("r10", 1)) is not None
    assert graves.find(("r10", 2)) is None
    graves.tick(TOMBSTONE_NS + 10)
    assert graves.find(("r10", 1)) is None
    assert graves.find(("r11", 1)) is not None
    graves.tick(last_ns := TOMBSTONE_NS + MAX_TOMBSTONES + 8)
    assert graves.find(last) is not None
    graves.tick(last_ns + 1)
    assert graves.find(last) is None


async def test_a_lapsed_lease_is_not_told_as_a_cancel() -> None:
    """Defect 17: nobody cancelled; the client may try again."""
    async with workers("decode-0", emulated_token_s=0.02) as (decode,):
        router = MiniRouter(decode)
        await router.connect()
        await router.submit("a", [1, 2, 3], sampling={"max_tokens": 1000}, lease_ms=300)
        await router.until(lambda: router.tokens["a"])
        await router.drop_stream()
        await asyncio.sleep(1.0)
        await router.connect()
        await router.send(resume=pb.Resume(request_id="a", attempt=1, next_index=[0]))
        error = (await router.ended("a", 3.0)).error
        assert (error.code, error.retryable) == ("unavailable", True)
        assert error.message == "the router's lease lapsed"
        await router.close()


async def test_a_stream_whose_listener_broke_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspicion a: it reported status, and heard nothing, for a minute."""
    handle, failures = DecodeService._handle, []

    def break_at_drain(self, frame, session) -> None:
        if frame.HasField("drain"):
            raise RuntimeError("by design")
        handle(self, frame, session)

    monkeypatch.setattr(DecodeService, "_handle", break_at_drain)
    monkeypatch.setattr(
        WorkerParts, "count_task_failure", lambda _, task: failures.append(task), raising=False
    )
    async with worker_here("decode-0", emulated_token_s=0.02) as decode:
        router = MiniRouter(decode)
        await router.connect()
        await router.submit("a", [1, 2, 3], sampling={"max_tokens": 60})
        await router.until(lambda: router.tokens["a"])
        await router.send(drain=pb.Drain(on=True))
        reading = router._tasks[0]
        await asyncio.wait_for(asyncio.shield(reading), 3.0)
        assert failures == ["listen"]
        await router.drop_stream()
        await router.connect()
        seen = len(router.tokens["a"][0])
        await router.send(resume=pb.Resume(request_id="a", attempt=1, next_index=[seen]))
        assert not (await router.ended("a")).HasField("error")
        assert len(router.tokens["a"][0]) == 60
        await router.close()
