"""Scores of prompts and vectors through two real worker processes: the same on every way."""

import asyncio

import pytest

from tests.workers.harness import routed, workers

PROMPT = [(7 * i + 3) % 256 for i in range(203)]
K = 2
SCORED = {"prompt_logprobs": K + 1, "max_tokens": 4}


def whole(router, name):
    scores = router.scores[name].complete
    assert scores is not None, "some are missing"
    return scores


@pytest.fixture
async def pair():
    async with workers("prefill-0", "decode-0", kv_blocks=1600) as (prefill, decode):
        async with routed(decode) as router, routed(prefill) as other:
            yield prefill, router
            await router.baseline()
            await other.baseline()


async def test_scores_and_vectors_are_the_same_with_a_hand_off_and_without(pair):
    prefill, router = pair
    kinds = {
        "one": {"sampling": SCORED},
        "many": {"sampling": SCORED | {"n": 3, "temperature": 1.0, "seed": 5}},
        "only": {"sampling": SCORED | {"max_tokens": 1}},
        "mean": {"pooling": "mean"},
        "last": {"pooling": "last"},
    }
    for name, fields in kinds.items():
        for where, target in (("here", None), ("there", prefill)):
            await router.submit(f"{name} {where}", PROMPT, target, **fields)
            end = await router.ended(f"{name} {where}")
            assert not end.HasField("error"), end
            route = router.routes[f"{name} {where}"]
            assert route.mode == ("disaggregated" if target else "colocated")
            assert route.cached_tokens == 0, "the prompt was there already, and yet computed"
            if name in ("only", "mean", "last"):
                assert end.times.transfer_bytes == 0
        assert router.tokens[f"{name} here"] == router.tokens[f"{name} there"]
        if "pooling" in fields:
            assert router.tokens[f"{name} here"] == {}
            assert router.vectors[f"{name} here"] == router.vectors[f"{name} there"] != b""
        else:
            assert whole(router, f"{name} here") == whole(router, f"{name} there")
    assert router.vectors["mean here"] != router.vectors["last here"]


async def test_a_long_prompts_scores_fit_into_messages_and_survive_a_lost_stream(pair):
    prefill, router = pair
    prompt = [(7 * i + 3) % 256 for i in range(8_000)]
    await router.submit("a", prompt, prefill, sampling={"prompt_logprobs": 21, "max_tokens": 60})
    await router.until(lambda: router.scores["a"].complete is not None)
    scores = whole(router, "a")
    assert len(scores.top_ids) == 4 * 20 * (len(prompt) - 1)
    await router.drop_stream()
    router.scores["a"], router.tokens["a"] = (
        type(router.scores["a"])(len(prompt) - 1),
        {},
    )
    await router.connect()
    await router.send(resume={"request_id": "a", "attempt": 1, "next_index": [0]})
    end = await router.ended("a")
    assert not end.HasField("error"), end
    assert whole(router, "a") == scores
    assert len(router.tokens["a"][0]) == 60
    assert router.largest_frame < 1.5 * 2**20


@pytest.mark.slow
async def test_a_prefill_worker_that_dies_on_the_way_leaves_no_half_scores():
    slow = {"prefill_emulated_token_s": 0.002}
    async with workers("prefill-0", "decode-0", **slow) as (prefill, decode):
        async with routed(decode) as router:
            await router.submit("a", PROMPT, prefill, sampling=SCORED)
            await router.submit("e", PROMPT, prefill, pooling="mean")
            await asyncio.sleep(0.15)
            prefill.kill_engine()
            both = {"a", "e"}
            await router.until(lambda: {ask.request_id for ask in router.asks} == both)
            for name in ("a", "e"):
                local = {"request_id": name, "attempt": 1, "compute_locally": True}
                await router.send(replacement=local)
                assert not (await router.ended(name)).HasField("error")
            await router.submit("b", PROMPT, sampling=SCORED)
            await router.submit("f", PROMPT, pooling="mean")
            await router.ended("b")
            await router.ended("f")
            assert whole(router, "a") == whole(router, "b")
            assert router.vectors["e"] == router.vectors["f"]
            await router.baseline()
