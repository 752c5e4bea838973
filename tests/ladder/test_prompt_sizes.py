"""Prompts of 1,024 to 131,072 tokens on every path, at workers that were idle and at busy ones.

Each answer comes in one attempt with the tokens of a colocated one, no event loop is held for
50 ms (of its thread's CPU time: on a busy machine others hold it, too), and a worker's memory does
not grow with the prompts that it has served.
"""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from config.fleet_file import DEFAULT_MODEL
from engine.artifacts.artifact import resolve_model
from engine.core.geometry import BLOCK_TOKENS
from engine.settings import KvTierSettings
from tests.engine.tiny_llama import write_llama
from tests.ladder.rungs import (
    CONTEXT_TOKENS,
    SIZES,
    LadderFleet,
    LoopHolds,
    hold_s,
    ladder_fleet,
    prompt_of,
)
from tests.registry.conftest import redis_server
from tests.workers.harness import routed, workers

__all__ = ["redis_server"]

IDLE_S = 61.0  # a worker drops a router that sends nothing for a minute
HELD_S = 0.05
GROWTH_BYTES = 40 << 20  # a pool that stays mapped is 80
MODES = {
    "colocated": ("colocated", ("decode-0",), ()),
    "shared_memory": ("disaggregated", ("prefill-0", "decode-0"), ("shared_memory",)),
    "tcp": ("disaggregated", ("prefill-0", "decode-0"), ("tcp",)),
    "grpc": ("disaggregated", ("prefill-0", "decode-0"), ("grpc",)),
}
BUSY = ("colocated", "shared_memory")
FIRST = SIZES[2]  # the first that goes by a call of its own: it exceeds 64 KiB
EACH_RUN = {"tcp": (FIRST, SIZES[-1]), "grpc": (FIRST, SIZES[-1])}  # other sizes: make test-all


@pytest.fixture(scope="module")
def artifact():
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture
def holds(tmp_path, monkeypatch):
    """The folder in which each worker writes for how long its event loop was held."""
    monkeypatch.setenv("BATON_TEST_HOLDS", str(tmp_path))
    return tmp_path


@dataclass
class Climber:
    """One path, and what it answered."""

    path: str
    fleet: LadderFleet
    texts: dict[tuple[int, int], str]

    async def step(self, size: int, salt: int) -> None:
        mode, names, _ = MODES[self.path]
        answer = await self.fleet.ask(prompt_of(size, salt), mode)
        assert answer.attempts == 1, (self.path, size, answer)
        assert f"mode={mode}" in answer.route
        assert f"decode={names[-1]}" in answer.route
        assert answer.usage["prompt_tokens"] == size
        assert not self.fleet.deaths
        self.texts[size, salt] = answer.text

    async def climb_idle(self, sizes: Sequence[int]) -> None:
        """Each prompt comes to workers at rest; the first of more than 64 KiB after a minute."""
        for size in (FIRST, *(size for size in sizes if size != FIRST)):
            await self.until_resting()
            await self.step(size, 1)

    async def climb_busy(self, sizes: tuple[int, ...]) -> None:
        """Each prompt comes to workers that write another answer."""
        mode = MODES[self.path][0]
        for size in sizes:
            fields = {"max_tokens": 600}
            other = asyncio.create_task(self.fleet.ask(prompt_of(100, 9), mode, **fields))
            while not self.fleet.router.parts.gateway.admission.running:
                await asyncio.sleep(0.01)
            await self.step(size, 2)
            answer = await other
            assert answer.attempts == 1

    async def until_resting(self) -> None:
        async with asyncio.timeout(20):
            while not self.fleet.resting:
                await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", [EACH_RUN, pytest.param({}, marks=pytest.mark.slow)])
async def test_every_size_on_each_way_of_a_hand_off(artifact, redis_server, holds, sizes):
    async with contextlib.AsyncExitStack() as stack:
        fleets = [
            ladder_fleet(artifact, redis_server.url, path, *names, transports=transports)
            for path, (_, names, transports) in MODES.items()
        ]
        entered = [await stack.enter_async_context(fleet) for fleet in fleets]
        climbers = [Climber(path, fleet, {}) for path, fleet in zip(MODES, entered, strict=True)]
        await asyncio.sleep(IDLE_S)
        watch = LoopHolds()
        watching = asyncio.create_task(watch.watch())
        for climber in climbers:
            await climber.climb_idle(sizes.get(climber.path, SIZES))
        held_s = {"router": watch.longest_s}
        for climber in climbers:
            for name, worker in climber.fleet.workers.items():
                held_s[f"{climber.path} {name}"] = hold_s(holds, worker)
        assert max(held_s.values()) < HELD_S, held_s
        for climber in climbers[: len(BUSY)]:
            await climber.climb_busy((8192,))
            before = climber.fleet.memory_bytes()
            await climber.climb_busy((FIRST,))
            await climber.step(SIZES[-1], 1)  # once more: nothing of it is new
            after = climber.fleet.memory_bytes()
            growth = {name: after[name] - before[name] for name in after}
            assert max(growth.values()) < GROWTH_BYTES, growth
        watching.cancel()
        golden = climbers[0].texts
        for climber in climbers[1:]:
            ours = {key: text for key, text in climber.texts.items() if key in golden}
            assert ours == {key: golden[key] for key in ours}
            assert {size for size, salt in ours if salt == 1} == {*sizes.get(climber.path, SIZES)}


@pytest.mark.parametrize(
    "size", [17_408, *(pytest.param(size, marks=pytest.mark.slow) for size in (33_792, 131_072))]
)
async def test_an_answer_moves_from_a_killed_worker(artifact, redis_server, holds, size):
    names = ("decode-0", "decode-1")
    async with ladder_fleet(artifact, redis_server.url, "moved", *names) as fleet:
        fields = {"max_tokens": 60}
        golden = await fleet.ask(prompt_of(size, 1), "colocated", **fields)
        other = asyncio.create_task(fleet.ask(prompt_of(size, 2), "colocated", **fields))
        gateway = fleet.router.parts.gateway
        while not any(
            choice.token_ids for one in gateway._active.values() for choice in one.record.choices
        ):
            await asyncio.sleep(0.01)
        [active] = [one for one in gateway._active.values() if not one.record.ended]
        went = active.decode_id
        fleet.workers[went].signal_all(signal.SIGKILL)
        moved = await other
        assert moved.attempts == 2
        assert moved.usage["completion_tokens"] == golden.usage["completion_tokens"] == 60
        left = await fleet.ask(prompt_of(size, 2), "colocated", **fields)
        assert moved.text == left.text


async def saved(fleet: LadderFleet, blocks: int) -> None:
    """Wait until the worker's tier holds so many blocks."""
    async with asyncio.timeout(30):
        while True:
            [worker] = fleet.table.describe()["workers"]
            held = [tier["held"] for tier in worker["kv_tiers"].values()]
            if held and held[0] >= blocks:
                return
            # A worker at rest reports nothing new: a short prompt makes it report.
            await fleet.ask(prompt_of(20, 5), "colocated")
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    "size", [17_408, *(pytest.param(size, marks=pytest.mark.slow) for size in (66_560, 131_072))]
)
async def test_a_prompt_comes_back_from_a_tier(artifact, redis_server, holds, size):
    prompt_blocks = size // BLOCK_TOKENS
    blocks = prompt_blocks * 6 // 5
    tiers = KvTierSettings(memory_mb=64 + size // 500)
    settings = {"kv_blocks": blocks, "kv_tiers": tiers}
    async with ladder_fleet(artifact, redis_server.url, "tiers", "decode-0", **settings) as fleet:
        first = await fleet.ask(prompt_of(size, 1), "colocated")
        await saved(fleet, prompt_blocks * 3 // 10)
        await fleet.ask(prompt_of(size * 2 // 5, 2), "colocated")  # takes the place of its end
        again = await fleet.ask(prompt_of(size, 1), "colocated")
        assert again.text == first.text
        assert again.attempts == 1
        assert again.usage["prompt_tokens_details"]["cached_tokens"] > size * 9 // 10


@pytest.mark.parametrize(
    "size", SIZES[2:3] + tuple(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[3:])
)
async def test_a_long_prefix_is_pulled_from_another_worker(size):
    prompt = prompt_of(size, 1)
    blocks = size // BLOCK_TOKENS - 1
    async with workers("decode-0", "decode-1", kv_blocks=10_000, check_every_step=False) as (a, b):
        async with routed(a) as router:
            await router.submit("golden", prompt)
            assert not (await router.ended("golden", 60)).HasField("error")
            golden = router.tokens["golden"]
        async with routed(b) as router:
            await router.submit("pulled", prompt, prefix=(a, blocks))
            end = await router.ended("pulled", 60)
            assert not end.HasField("error"), end.error.message
            assert router.tokens["pulled"] == golden
            assert router.routes["pulled"].cached_tokens == blocks * BLOCK_TOKENS
            await router.baseline()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "size", SIZES[2:3] + tuple(pytest.param(size, marks=pytest.mark.slow) for size in SIZES[3:])
)
async def test_two_ranks_compute_a_long_prompt_and_hand_it_over(tmp_path, size):
    """Emulated engines have one rank: the model is a tiny one, of real layers."""
    model = write_llama(tmp_path / "tiny", context_tokens=CONTEXT_TOKENS)
    prompt = [position * 7 % 400 + 100 for position in range(size)]
    settings = {
        "model": model,
        "kv_blocks": size // BLOCK_TOKENS + 64,
        "max_context_tokens": CONTEXT_TOKENS,
        "max_step_tokens": 2048,
        "check_every_step": False,
        "prefill_tensor_parallel": 2,
    }
    async with workers("prefill-0", "decode-0", **settings) as (prefill, decode):
        async with routed(decode) as router:
            await router.submit("handed", prompt, prefill)
            end = await router.ended("handed", 800)
            assert not end.HasField("error"), end.error.message
            assert router.routes["handed"].mode == "disaggregated"
            golden = router.tokens["handed"]
        async with routed(prefill) as router:
            await router.submit("alone", prompt)
            assert not (await router.ended("alone", 60)).HasField("error")
            assert router.tokens["alone"] == golden
