"""Ranks that share nothing with their leader but TCP: every rank's KV is pulled where it is."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.engine.tiny_llama import write_llama
from tests.workers.apart import RankApart, led, ranks_apart
from tests.workers.harness import WorkerProcess, routed, workers
from tests.workers.test_own_pools import (
    go_on_alone,
    golden,
    late_prefill,
    no_token_before_the_last_head,
)
from tests.workers.test_tensor_parallel import PROMPT, SMOLLM2, both_ways
from tests.workers.test_transports import counted


@asynccontextmanager
async def apart(
    model: str, prefill: int, decode: int, **engine: object
) -> AsyncIterator[tuple[list[WorkerProcess], list[RankApart]]]:
    """A prefill and a decode worker of these widths, and all ranks behind their leaders."""
    async with ranks_apart(prefill + decode - 2) as ranks:
        roles = {"prefill_": ranks[: prefill - 1], "decode_": ranks[prefill - 1 :]}
        fields = {
            role + name: value
            for role, own in roles.items()
            if own
            for name, value in led(own).items()
        }
        async with workers("prefill-0", "decode-0", model=model, **fields, **engine) as ends:
            yield ends, ranks


@pytest.mark.slow
async def test_a_rank_apart_serves_and_takes_its_heads_until_it_dies(tmp_path: Path) -> None:
    """Head 0 at the leader's address, 1 and 2 at the rank's, whose frames come damaged."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    async with ranks_apart(1, fault_injection="flip:2") as ranks:
        fields = {f"prefill_{name}": value for name, value in led(ranks).items()}
        async with workers("prefill-0", "decode-0", model=model, **fields) as ends:
            prefill, decode = ends
            await both_ways(prefill, decode)
            assert sum((await counted(decode.record, "baton_chunks_repaired")).values()) > 0
            ranks[0].process.kill()  # nothing runs: noticed all the same
            assert await asyncio.wait_for(prefill.process.wait(), 5) == 1


@pytest.mark.slow
async def test_a_rank_of_prefill_that_dies_in_a_hand_off_ends_its_replica(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    async with ranks_apart(1, program=("tests.workers.late_heads", "rank")) as ranks:
        fields = {f"prefill_{name}": value for name, value in led(ranks).items()}
        async with workers("prefill-0", "decode-0", model=model, **fields) as (prefill, decode):
            async with routed(decode) as router:
                await router.submit("cut off", PROMPT, prefill)
                await router.until(lambda: router.tokens["cut off"].get(0))
                ranks[0].process.kill()
                await router.until(lambda: router.asks, 20)
                assert await asyncio.wait_for(prefill.process.wait(), 5) == 1
                await go_on_alone(router, "cut off")
                await router.baseline()
                await golden(router, "cut off")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "kv_heads"), [(1, 3, 1), (3, 3, 3), (3, 1, 3), (2, 3, 3)]
)
async def test_any_widths_apart(tmp_path: Path, prefill: int, decode: int, kv_heads: int) -> None:
    model = write_llama(tmp_path / "tiny", heads=4 if kv_heads == 1 else 6, kv_heads=kv_heads)
    async with apart(model, prefill, decode) as (ends, _):
        await both_ways(*ends)
        async with routed(ends[1]) as router:
            await router.submit("handed", PROMPT, ends[0])
            await router.ended("handed")
            await golden(router, "handed")
            await router.submit("held", PROMPT[::-1], None)
            await router.ended("held")
            async with routed(ends[0], "other") as other:
                await other.submit("pulled", PROMPT[::-1], None, prefix=(ends[1], 9))
                await other.ended("pulled")
                assert other.tokens["pulled"] == router.tokens["held"]
                pulls = await counted(ends[0].record, "baton_prefix_pulls")
                assert pulls == {'outcome="pulled"': 1}
                await other.baseline()
            await router.baseline()


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 3), (3, 1), (3, 3), (2, 3)])
async def test_smollm2_apart(widths: tuple[int, int]) -> None:
    async with workers("decode-1", model=SMOLLM2) as (one,), routed(one) as router:
        await router.submit("a", PROMPT, None)
        await router.ended("a", 60)
        alone = router.tokens["a"]
    async with apart(SMOLLM2, *widths) as (ends, _), routed(ends[1]) as router:
        await router.submit("a", PROMPT, ends[0])
        end = await router.ended("a", 60)
        assert not end.HasField("error"), end.error.message
        assert router.routes["a"].mode == "disaggregated"
        assert router.tokens["a"] == alone


@pytest.mark.slow
async def test_no_rank_decodes_before_the_last_one_has_its_heads(tmp_path: Path) -> None:
    """One late edge of three, to ranks that pull for themselves."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    async with late_prefill(model, transports=("grpc",)) as late, ranks_apart(2) as ranks:
        async with workers("decode-0", model=model, **led(ranks)) as (decode,):
            await no_token_before_the_last_head(late, decode)


@pytest.mark.slow
@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_of_decode_that_dies_or_freezes_ends_its_replica(
    tmp_path: Path, fate: int
) -> None:
    """In a hand-off; prefill's blocks come free, its own and at its rank."""
    model = write_llama(tmp_path / "tiny", heads=6, kv_heads=3)
    async with (
        late_prefill(model, transports=("grpc",)) as prefill,
        ranks_apart(2) as ranks,
        workers("decode-0", model=model, **led(ranks)) as (decode,),
        routed(decode) as router,
        routed(prefill) as other,
    ):
        await router.submit("cut off", PROMPT, prefill)
        await router.until(lambda: router.tokens["cut off"].get(0))
        victim, began_s = ranks[1].process, time.monotonic()
        engines = psutil.Process(victim.pid).children()
        os.kill(victim.pid, fate)
        for engine in engines if fate == signal.SIGSTOP else ():
            engine.suspend()
        assert await asyncio.wait_for(decode.process.wait(), 25) == 1
        assert time.monotonic() - began_s < 20
        await other.baseline(10)
        _, alive = psutil.wait_procs(engines, timeout=5 if fate == signal.SIGKILL else 0)
        assert fate == signal.SIGSTOP or not alive
        assert await asyncio.wait_for(ranks[0].process.wait(), 5) == 0, "with its leader"
