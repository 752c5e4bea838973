"""Hand-offs of two ranks to two ranks (`make test-vllm-hand-off`), on this machine's CPU."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.engine import tiny_llama
from tests.vllm.hand_offs import doubtful, vllm_metric
from tests.vllm.places import MODEL, PYTHON
from tests.vllm.test_baton_hand_off import ANSWER, EXTERNAL_HITS, check_rest, pair, vllm_of
from tests.vllm.test_fleet import alone
from tests.workers.harness import MiniRouter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]


async def test_two_ranks_hand_over_to_two_ranks(tmp_path: Path) -> None:
    model = tmp_path / "model"  # the heads of SmolLM2 cannot be divided by two
    tiny_llama.write_llama(model, heads=4, kv_heads=2, context_tokens=2048)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model)
    async with pair(model, "--tensor-parallel-size", "2") as (prefill, decode):
        router = MiniRouter(decode)
        await router.connect()
        own_socket = vllm_of(decode)
        repaired = 0
        loaded_tokens = 0
        different: list[int] = []
        for number in range(8):
            name = f"r{number}"
            prompt = [5 + (40 * number + 7 * at) % 500 for at in range(17 + 90 * number)]
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
        assert len(different) <= 1, different
        assert await asyncio.to_thread(vllm_metric, own_socket, EXTERNAL_HITS) == loaded_tokens
        assert repaired > 0
        await router.baseline(30.0)
        await router.close()
        for worker in (prefill, decode):
            await check_rest(vllm_of(worker))
