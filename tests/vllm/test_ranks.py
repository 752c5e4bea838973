"""Hand-offs of one and two ranks to two ranks, and pulls back (`make test-vllm-hand-off`)."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.engine import tiny_llama
from tests.vllm.hand_offs import doubtful, vllm_metric
from tests.vllm.places import MODEL, PYTHON
from tests.vllm.test_baton_hand_off import ANSWER, EXTERNAL_HITS, check_rest, starting, vllm_of
from tests.vllm.test_fleet import alone
from tests.workers.harness import MiniRouter, WorkerProcess
from tests.workers.test_prefix_pull import outcomes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]

WIDTH = "--tensor-parallel-size"


async def test_two_ranks_and_one_hand_over_to_two_ranks(tmp_path: Path) -> None:
    """To one decode worker, as its four processes take half a minute to start."""
    model = tmp_path / "model"  # the heads of SmolLM2 cannot be divided by two
    tiny_llama.write_llama(model, heads=4, kv_heads=2, context_tokens=2048)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model)
    async with starting(model, WIDTH, "2") as start:
        decode, prefill = await asyncio.gather(start("decode-0"), start("prefill-2", WIDTH, "2"))
        router = MiniRouter(decode)
        await router.connect()
        await check_from(router, prefill, ranks=2, most_ties=1)
        await prefill.stop()
        await check_from(router, await start("prefill-1", WIDTH, "1"), ranks=1, most_ties=4)
        await router.close()
        await check_rest(vllm_of(decode))


async def check_from(
    router: MiniRouter, prefill: WorkerProcess, ranks: int, most_ties: int
) -> None:
    await check_hand_offs(router, prefill, ranks, most_ties)
    await check_pull_from_decode(router, prefill, ranks)
    await router.baseline(30.0)
    await check_rest(vllm_of(prefill))


async def check_hand_offs(
    router: MiniRouter, prefill: WorkerProcess, ranks: int, most_ties: int
) -> None:
    """Check the tokens of prompts that the decode worker's ranks load.

    Other widths give other sums, so that more near ties differ.
    """
    own_socket = vllm_of(router.worker)
    before = await asyncio.to_thread(vllm_metric, own_socket, EXTERNAL_HITS)
    repaired = 0
    loaded_tokens = 0
    different: list[int] = []
    for number in range(8):
        name = f"r{number} of {ranks}"
        prompt = [5 + (40 * number + 13 * ranks + 7 * at) % 500 for at in range(17 + 90 * number)]
        await router.submit(name, prompt, prefill, sampling=ANSWER)
        ended = await router.ended(name, 60.0)
        assert not ended.HasField("error"), ended
        assert router.routes[name].mode == "disaggregated"
        repaired += ended.times.repaired_chunks
        loaded_tokens += len(prompt) // 32 * 32
        tokens = router.tokens[name][0]
        if tokens != await alone(own_socket, prompt):
            different.append(number)
            assert not await doubtful(own_socket, prompt, tokens), (number, tokens)
    assert len(different) <= most_ties, different
    after = await asyncio.to_thread(vllm_metric, own_socket, EXTERNAL_HITS)
    assert after - before == loaded_tokens
    assert repaired > 0


async def check_pull_from_decode(router: MiniRouter, prefill: WorkerProcess, ranks: int) -> None:
    """Check the tokens of a turn whose prefix, the last response included, is at decode's ranks."""
    sampling = {"max_tokens": 60, "ignore_eos": True}
    first = f"turn 1 of {ranks}"
    begin = 7 * ranks
    await router.submit(first, list(range(begin, begin + 200)), sampling=sampling)
    assert not (await router.ended(first, 60.0)).HasField("error")
    await asyncio.sleep(1.0)  # vLLM's KV events follow the response
    prompt = [*range(begin, begin + 200), *router.tokens[first][0], *range(300, 350)]
    at_prefill = MiniRouter(prefill, "owner")
    await at_prefill.connect()
    source = (router.worker, 256 // 16)
    await at_prefill.submit("turn 2", prompt, sampling=ANSWER, prefix=source)
    ended = await at_prefill.ended("turn 2", 60.0)
    assert not ended.HasField("error"), ended
    assert await outcomes(prefill) == {"pulled": 1}
    assert ended.times.cached_tokens == 256
    tokens = at_prefill.tokens["turn 2"][0]
    await at_prefill.close()
    if tokens != await alone(vllm_of(router.worker), prompt):
        assert not await doubtful(vllm_of(router.worker), prompt, tokens)
