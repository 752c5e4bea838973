"""Hand-offs of two real vLLMs by Baton's transports (`make test-vllm`), on this machine's CPU.

Every third frame is damaged on its way. The drills beside a recorded vLLM are in
``tests/workers/test_vllm_hand_off.py``.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
import pytest

from baton.engine.settings import ExternalEngine
from tests.vllm.hand_offs import near_tie, vllm_metric
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, alone
from tests.workers.harness import MiniRouter, WorkerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
ANSWER = {"max_tokens": 12}


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    async with contextlib.AsyncExitStack() as undo:
        external = ExternalEngine(kind="vllm", python=str(PYTHON), args=ARGS, hand_off="baton")

        async def start(worker_id: str) -> WorkerProcess:
            worker = await WorkerProcess.start(
                worker_id,
                ready_s=READY_S,
                model=str(MODEL),
                numerics="fast",
                max_context_tokens=2048,
                external=external,
                fault_injection="flip:3",
            )
            undo.push_async_callback(worker.stop)
            return worker

        started = await asyncio.gather(start("prefill-0"), start("decode-0"))
        yield started[0], started[1]


async def test_the_tokens_are_those_of_vllm_alone_and_damage_is_repaired() -> None:
    """But for near ties in bf16. Prompts of 17 to 1,567 tokens; a block of vLLM has 32."""
    async with pair() as (prefill, decode):
        router = MiniRouter(decode)
        await router.connect()
        line = psutil.Process(decode.record.pid).cmdline()
        own_socket = line[line.index("--uds") + 1]
        different: list[int] = []
        repaired = 0
        loaded_tokens = 0
        for number in range(32):
            name = f"r{number}"
            prompt = list(range(300 + 40 * number, 300 + 40 * number + 17 + 50 * number))
            await router.submit(name, prompt, prefill, sampling=ANSWER)
            ended = await router.ended(name, 60.0)
            assert not ended.HasField("error"), ended
            assert router.routes[name].mode == "disaggregated"
            repaired += ended.times.repaired_chunks
            tokens = router.tokens[name][0]
            if tokens != await alone(own_socket, prompt):
                different.append(number)
                assert await near_tie(own_socket, prompt, tokens), (number, tokens)
            loaded_tokens += len(prompt) // 32 * 32
        assert len(different) <= 4, different
        hits = await asyncio.to_thread(vllm_metric, own_socket, "external_prefix_cache_hits_total")
        assert hits == loaded_tokens
        assert repaired > 0
        await router.baseline()
        at_prefill = MiniRouter(prefill)
        await at_prefill.connect()
        await at_prefill.baseline()
        await at_prefill.close()
        await router.close()
