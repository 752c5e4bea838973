"""Two real worker processes hand KV over; then things go wrong."""

import asyncio
import os
import re
import signal
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import grpc
import httpx
import pytest
from batonpb import decode_pb2 as pb
from batonpb import decode_pb2_grpc
from batonpb.common_pb2 import WorkerIdentity
from batonpb.prefill_pb2 import PrefillAccepted, PrefillEvent, Published

from baton.types import events as ev
from baton.types.geometry import KvGeometry
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_options import open_channel
from baton.wire.tokens import pack_tokens, unpack_tokens
from decode_worker.handoff import ReceivedHandoff
from decode_worker.pacing import ReceivePacer
from kvtransfer.kv_slice import FRAME_BYTES
from tests.workers.harness import TOKEN, MiniRouter, WorkerProcess, routed, workers

PROMPT = list(range(3, 203))
SLOW = 0.002  # seconds per token: 200 tokens take 0.4 s


async def golden(router: MiniRouter, prompt: list[int], name: str = "golden", **fields):
    await router.submit(name, prompt, **fields)
    await router.ended(name)
    return router.tokens[name]


async def test_disaggregated_equals_colocated():
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        await router.submit("a", PROMPT, prefill, sampling={"n": 3, "temperature": 1.0, "seed": 9})
        end = await router.ended("a")
        assert not end.HasField("error")
        assert router.routes["a"].mode == "disaggregated"
        assert end.times.transfer_bytes == len(PROMPT) * 4 * 2 * 2 * 8 * 2
        assert end.times.reserve_ns > 0
        assert end.times.first_ns >= end.times.queue_ns + end.times.prefill_ns > 0
        want = await golden(router, PROMPT, sampling={"n": 3, "temperature": 1.0, "seed": 9})
        assert router.routes["golden"].mode == "colocated"
        assert router.tokens["a"] == want
        await router.baseline()
        async with routed(prefill) as other:
            await other.baseline()


async def test_a_repeat_moves_only_what_decode_lacks():
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        await router.submit("a", PROMPT, prefill)
        await router.submit("b", PROMPT + [7] * 20, prefill)
        await router.ended("a")
        end = await router.ended("b")
        await router.submit("c", PROMPT + [7] * 20, prefill)
        again = await router.ended("c")
        assert router.tokens["b"] == router.tokens["c"]
        assert again.times.transfer_bytes < end.times.transfer_bytes
        assert router.routes["c"].cached_tokens == 208


async def test_one_token_needs_no_transfer():
    async with workers("prefill-0", "decode-0") as (prefill, decode), routed(decode) as router:
        await router.submit("a", PROMPT, prefill, sampling={"max_tokens": 1})
        end = await router.ended("a")
        assert not end.HasField("error")
        assert end.times.transfer_bytes == 0
        assert len(router.tokens["a"][0]) == 1
        await router.baseline()


async def test_a_long_prompt_whose_answer_is_one_token_is_no_stall(monkeypatch):
    """Prefill sends heartbeats only while it has nothing to publish."""
    now_s = 0
    clock = SimpleNamespace(monotonic_ns=lambda: now_s * 10**9)
    monkeypatch.setattr("decode_worker.handoff.ALIVE", SimpleNamespace(now_ns=clock.monotonic_ns))
    geometry = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=8, num_blocks=64, dtype="bf16")
    submission = pb.Submission(request_id="a", prompt_tokens=pack_tokens(range(400)))
    submission.sampling.max_tokens = 1
    pool, peers = SimpleNamespace(geometry=geometry, parts=()), AsyncMock()
    peers.frame_bytes = Mock(return_value=FRAME_BYTES)
    parts = SimpleNamespace(
        engine=Mock(),
        pool=pool,
        peers=peers,
        identity=WorkerIdentity(),
        metrics=Mock(),
        count_task_failure=Mock(),
        pacer=ReceivePacer(0.0),
    )
    listener = Mock()
    handoff = ReceivedHandoff(submission, "d/a/1", parts, listener)
    handoff.on_report(ev.Reserved("d/a/1", generation=1, skip_blocks=0))
    handoff.on_event(PrefillEvent(accepted=PrefillAccepted()))
    for block in range(25):
        now_s += 1
        kv_slice = Published(layer_count=4, block_begin=block, block_count=1, valid_tokens=16)
        handoff.on_event(PrefillEvent(published=kv_slice))
        handoff.tick(clock.monotonic_ns())
    listener.on_peer_needed.assert_not_called()
    now_s += 11
    handoff.tick(clock.monotonic_ns())
    listener.on_peer_needed.assert_called_once()
    target, error, died = listener.on_peer_needed.call_args.args
    assert (target, died) == (submission.prefill, False)
    assert (error.code, error.message) == ("transfer_failed", "no progress for 10.0 s")
    await handoff._tasks.close()
    parts.count_task_failure.assert_not_called()


@pytest.mark.parametrize("when", ["queued", "computing", "decoding"])
async def test_cancel_at_each_stage_frees_both_sides(when):
    slow = {"prefill_emulated_token_s": SLOW, "decode_emulated_token_s": 0.05}
    async with workers("prefill-0", "decode-0", **slow) as (prefill, decode):
        async with routed(decode) as router, routed(prefill) as other:
            await router.submit("a", PROMPT, prefill, sampling={"max_tokens": 100})
            if when == "computing":
                await asyncio.sleep(0.15)
            elif when == "decoding":  # the first token comes before the KV does
                await router.until(lambda: len(router.tokens["a"].get(0, [])) > 1)
            await router.send(cancel=pb.Cancel(request_id="a", attempt=1))
            end = await router.ended("a", 2.0)
            assert end.error.code == "cancelled"
            await router.baseline(2.0)
            await other.baseline(2.0)
        if when != "queued":  # which may be over before a stream was opened
            outcome = "committed" if when == "decoding" else "abandoned"
            assert await transfers(decode) == {outcome: 1.0}


async def transfers(decode) -> dict[str, float]:
    """``baton_transfers_total`` of a worker, by outcome."""
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://{decode.record.metrics_address}/metrics")
    found = re.findall(r'baton_transfers_total\{.*outcome="(\w+)".*\} (\S+)', page.text)
    return {outcome: float(count) for outcome, count in found if float(count)}


async def test_a_silent_router_loses_its_lease():
    async with workers("decode-0", emulated_token_s=0.05) as (decode,):
        first = MiniRouter(decode, "gone")
        await first.connect()
        await first.submit("a", [1, 2, 3], sampling={"max_tokens": 120})
        await first.until(lambda: first.tokens["a"])
        await first.drop_stream()
        async with routed(decode, "other") as router:
            await router.until(lambda: router.status.running == 1)
            await router.baseline(4.0)


async def test_a_broken_stream_resumes_without_hole_or_repeat():
    async with workers("decode-0", emulated_token_s=0.02) as (decode,):
        router = MiniRouter(decode)
        await router.connect()
        await router.submit("a", [1, 2, 3], sampling={"max_tokens": 60})
        await router.until(lambda: len(router.tokens["a"].get(0, [])) > 5)
        await router.drop_stream()
        await asyncio.sleep(0.3)
        await router.resume("a")
        assert len(router.tokens["a"][0]) == 60
        assert router.tokens["a"] == await golden(router, [1, 2, 3], sampling={"max_tokens": 60})
        await router.close()


@pytest.mark.parametrize(
    "when_s",
    [pytest.param(0.0, marks=pytest.mark.slow), 0.2, pytest.param(0.4, marks=pytest.mark.slow)],
)
async def test_kill_prefill_and_another_takes_over(when_s):
    slow = {"prefill_emulated_token_s": SLOW}
    async with workers("prefill-0", "prefill-1", "decode-0", **slow) as (first, second, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, first)
            await asyncio.sleep(when_s)
            first.kill_engine()
            await router.until(lambda: router.asks or "a" in router.ends, 5.0)
            if router.asks:  # it may have been over already
                assert router.asks[0].failed.worker_id == "prefill-0"
                replacement = pb.PrefillReplacement(
                    request_id="a", attempt=1, prefill=second.target("a", decode.record)
                )
                await router.send(replacement=replacement)
            end = await router.ended("a")
            assert not end.HasField("error")
            assert router.tokens["a"] == await golden(router, PROMPT)
            await router.baseline()
        assert await first.process.wait() != 0, "a dead engine is told by the exit code"


async def test_kill_prefill_and_compute_locally():
    async with workers("prefill-0", "decode-0", prefill_emulated_token_s=SLOW) as (first, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, first)
            await asyncio.sleep(0.1)
            first.process.kill()
            await router.until(lambda: router.asks, 5.0)
            assert router.asks[0].peer_died
            await router.send(
                replacement=pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            )
            end = await router.ended("a")
            assert not end.HasField("error")
            assert router.tokens["a"] == await golden(router, PROMPT)
            await router.baseline()


async def test_a_frozen_prefill_worker_is_given_up():
    async with workers("prefill-0", "decode-0", prefill_emulated_token_s=SLOW) as (first, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, first)
            await asyncio.sleep(0.1)
            first.signal_all(signal.SIGSTOP)
            await router.until(lambda: router.asks, 8.0)
            await router.send(
                replacement=pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            )
            assert not (await router.ended("a")).HasField("error")
            await router.baseline()


async def test_an_engine_that_dies_takes_its_worker_along():
    async with workers("decode-0", emulated_token_s=0.05) as (decode,):
        async with routed(decode) as router:
            await router.submit("a", [1, 2, 3], sampling={"max_tokens": 100})
            await router.until(lambda: router.tokens["a"])
            decode.kill_engine()
            await router.until(lambda: router.lost, 2.0)
        assert await asyncio.wait_for(decode.process.wait(), 5) != 0


async def test_a_hung_engine_takes_its_worker_along():
    async with workers("decode-0", probe_s=1.0) as (decode,):
        await asyncio.sleep(1.5)
        os.kill(decode.record.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(decode.process.wait(), 12) != 0


async def test_nan_is_a_typed_error_and_its_worker_leaves_traffic():
    """The request gets the error; the probe, which meets NaN too, ends the worker."""
    sick = {"emulated_nan_after_steps": 6, "probe_s": 2.0}
    async with workers("decode-0", **sick) as (decode,), routed(decode) as router:
        await router.submit("a", PROMPT, sampling={"max_tokens": 100})
        assert (await router.ended("a", 5.0)).error.code == "numerics_error"
        assert await asyncio.wait_for(decode.process.wait(), 12) != 0


async def test_a_prefill_worker_that_is_only_slow_is_not_called_dead():
    async with workers("prefill-0", "decode-0") as (first, decode), routed(decode) as router:
        first.signal_all(signal.SIGSTOP)
        await router.submit("a", PROMPT, first)
        await router.until(lambda: router.asks, 8.0)
        assert not router.asks[0].peer_died
        first.signal_all(signal.SIGCONT)
        target = first.target("a", decode.record)
        again = pb.PrefillReplacement(request_id="a", attempt=1, prefill=target)
        await router.send(replacement=again)
        assert not (await router.ended("a")).HasField("error")


async def test_a_choice_that_stopped_stays_stopped_after_local_compute():
    async with workers("prefill-0", "decode-0", decode_emulated_token_s=0.01) as (first, decode):
        async with routed(decode) as router:
            first.process.kill()
            sampling = {"max_tokens": 80, "n": 2, "temperature": 1.0, "seed": 3}
            await router.submit("a", [1, 2, 3], first, sampling=sampling)
            await router.until(lambda: router.asks, 5.0)
            await router.send(
                replacement=pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            )
            await router.until(lambda: len(router.tokens["a"].get(0, [])) >= 3)
            await router.send(cancel=pb.Cancel(request_id="a", attempt=1, choices=[0]))
            await router.ended("a")
            assert len(router.tokens["a"][0]) < 40
            assert len(router.tokens["a"][1]) == 80


SLOW_DAMAGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("swap", "replay", "torn")]


@pytest.mark.parametrize("damage", ["flip", "incarnation", *SLOW_DAMAGE])
async def test_damage_now_and_then_is_repaired(damage):
    async with workers("prefill-0", "decode-0", prefill_damage=f"{damage}:3") as (
        prefill,
        decode,
    ):
        async with routed(decode) as router:
            for round_ in range(3):
                prompt = [round_, *PROMPT * 5]
                await router.submit(f"a{round_}", prompt, prefill)
                end = await router.ended(f"a{round_}")
                assert not end.HasField("error"), end.error.message
                assert router.tokens[f"a{round_}"] == await golden(router, prompt, f"g{round_}")
            await router.baseline()


@pytest.mark.parametrize("damage", ["flip", "incarnation", "torn"])
async def test_damage_that_never_stops_is_given_up_and_never_shown(damage):
    async with workers("prefill-0", "decode-0", prefill_damage=f"{damage}:1") as (
        prefill,
        decode,
    ):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill)
            await router.until(lambda: router.asks, 10.0)
            assert not router.asks[0].peer_died
            await router.send(
                replacement=pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            )
            assert not (await router.ended("a")).HasField("error")
            assert router.tokens["a"] == await golden(router, PROMPT)
            await router.until(lambda: router.status.transfers.failures >= 1)


async def test_a_pool_that_is_full_preempts_and_finishes_all():
    async with workers("prefill-0", "decode-0", decode_kv_blocks=40) as (prefill, decode):
        async with routed(decode) as router:
            for number in range(8):
                prompt = [number, *PROMPT]
                await router.submit(f"r{number}", prompt, prefill, sampling={"max_tokens": 60})
            for number in range(8):
                assert not (await router.ended(f"r{number}")).HasField("error")
            for number in (0, 7):
                want = await golden(
                    router, [number, *PROMPT], f"g{number}", sampling={"max_tokens": 60}
                )
                assert router.tokens[f"r{number}"] == want
            await router.baseline()


async def test_a_deadline_ends_the_request_at_the_worker():
    async with workers("decode-0", emulated_token_s=0.05) as (decode,), routed(decode) as router:
        await router.submit(
            "a", [1], sampling={"max_tokens": 100}, deadline_remaining_ns=300_000_000
        )
        end = await router.ended("a", 2.0)
        assert end.error.code == "deadline_exceeded"
        await router.baseline()


async def test_what_cannot_fit_is_one_clients_error():
    async with workers("decode-0", kv_blocks=8) as (decode,), routed(decode) as router:
        await router.submit("a", list(range(200)))
        end = await router.ended("a")
        assert end.error.code == "invalid_request"
        assert "8" in end.error.message


async def test_an_older_attempt_is_refused():
    async with workers("decode-0", emulated_token_s=0.05) as (decode,), routed(decode) as router:
        await router.submit("a", [1], attempt=2, sampling={"max_tokens": 50})
        await router.submit("a", [1], attempt=1)
        end = await router.ended("a")
        assert end.attempt == 1
        assert "older attempt" in end.error.message


async def test_calls_without_the_fleet_token_are_refused():
    async with workers("decode-0") as (decode,):
        channel = open_channel(decode.record.address)
        stub = decode_pb2_grpc.DecodeStub(channel)
        for metadata in ((), FleetToken("wrong").metadata):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Submit(pb.Submission(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_garbage_on_the_stream_harms_nobody_else():
    async with workers("decode-0") as (decode,), routed(decode) as router:
        channel = open_channel(decode.record.address)
        raw = channel.stream_stream("/baton.v1.Decode/Serve")
        call = raw(metadata=FleetToken(TOKEN).metadata)
        await call.write(b"\xff\xff\xff not a frame")
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
            raise AssertionError("the worker took garbage for a stream")
        await channel.close()
        assert await golden(router, [1, 2, 3])


async def test_drain_takes_nothing_new_and_finishes_the_rest():
    async with workers("decode-0", emulated_token_s=0.02) as (decode,), routed(decode) as router:
        await router.submit("old", [1], sampling={"max_tokens": 30})
        await router.send(drain=pb.Drain(on=True))
        await router.submit("new", [2])
        assert (await router.ended("new")).error.code == "unavailable"
        assert not (await router.ended("old")).HasField("error")
        assert len(router.tokens["old"][0]) == 30


def test_tokens_survive_the_wire():
    assert unpack_tokens(pack_tokens([0, 1, 2**32 - 1])) == [0, 1, 2**32 - 1]


async def test_a_prefill_worker_that_sends_too_few_first_tokens_is_not_used():
    """The choice without a token neither ran nor ended: the request stayed for ever."""
    few = await WorkerProcess.start("prefill-0", "tests.workers.few_first_tokens")
    try:
        async with workers("decode-0") as (decode,), routed(decode) as router:
            sampling = {"n": 2, "temperature": 1.0, "seed": 9}
            want = await golden(router, PROMPT, sampling=sampling, hash_seed=b"t" * 16)
            await router.submit("a", PROMPT, few, sampling=sampling)
            await router.until(lambda: router.asks)
            assert "1 first tokens arrived for 2 choices" in router.asks[0].reason.message
            local = pb.PrefillReplacement(request_id="a", attempt=1, compute_locally=True)
            await router.send(replacement=local)
            assert not (await router.ended("a")).HasField("error")
            assert router.tokens["a"] == want
            await router.baseline()
    finally:
        await few.stop()
