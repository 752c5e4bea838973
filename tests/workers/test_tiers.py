"""KV below the pool, with real processes: it comes back for prompts here and for peers."""

from baton.engine.settings import KvTierSettings
from tests.workers.harness import MiniRouter, routed, workers
from tests.workers.test_prefix_pull import BLOCK_TOKENS, BLOCKS, ask, outcomes, page_of

TIERS = KvTierSettings(memory_mb=1)


async def fill(router: MiniRouter, name: str) -> None:
    """Prompts, one after the other, that need more blocks than the pool has."""
    for number in range(5):
        await router.submit(f"{name}-{number}", [number + 5] * 200)
        assert not (await router.ended(f"{name}-{number}")).HasField("error")


async def test_what_was_evicted_is_brought_back_for_prompts_and_for_peers():
    async with workers("decode-0", "decode-1", kv_blocks=40, kv_tiers=TIERS) as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden")
            await fill(router, "first")
            assert await ask(router, "again") == golden
            assert router.routes["again"].cached_tokens == BLOCKS * BLOCK_TOKENS
            page = await page_of(a)
            assert 'baton_prefix_tokens_total{source="memory"}' in page
            assert 'baton_kv_tier_moved_bytes_total{direction="brought",tier="memory"}' in page
            await fill(router, "second")
            await router.baseline()
            (tier,) = router.status.kv_tiers
            assert tier.held_blocks > BLOCKS and tier.block_s > 0
        async with routed(b) as router:
            assert await ask(router, "pulled", prefix=(a, BLOCKS)) == golden
            assert await outcomes(b) == {"pulled": 1}
            await router.baseline()
        async with routed(a) as router:
            await router.baseline()
